"""Models this small gain nothing from threads, and their products must not change with how many there are."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent)]  # generator_modules


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
