from __future__ import annotations

import pathlib
import sys

import pytest

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent)]  # making_evidence

from making_evidence import FakeClock, FakeGpu


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def gpu(clock: FakeClock) -> FakeGpu:
    return FakeGpu(clock)
