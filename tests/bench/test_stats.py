"""Statistics on numbers whose truth is known."""

from __future__ import annotations

import math
import random

import pytest

from prequal.bench.stats import Spread, agree, change, is_noisy, median_interval


def test_a_spread_is_the_median_and_the_quartiles():
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([7.25]) == Spread(7.25, 7.25, 7.25, 1)


def test_a_spread_survives_json():
    spread = Spread.of([1.0, 2.0, 4.0])
    assert Spread.read(spread.json()) == spread


def test_spreads_agree_where_their_quartiles_meet():
    a = Spread(10, 9, 11, 100)
    assert agree(a, Spread(12, 11, 13, 100))
    assert not agree(a, Spread(13, 11.001, 14, 100))
    assert change(a, Spread(12, 11, 13, 100)) == "same"
    assert change(a, Spread(13, 12, 14, 100)) == "slower"
    assert change(a, Spread(7, 6, 8, 100)) == "faster"


def test_a_run_whose_halves_disagree_is_noisy():
    steady = [100.0 + i % 5 for i in range(100)]
    assert not is_noisy(steady)
    assert is_noisy([100.0 + i % 5 for i in range(50)] + [110.0 + i % 5 for i in range(50)])


def test_a_short_kernel_or_a_short_run_is_not_called_noisy():
    assert not is_noisy([10.0] * 50 + [15.0] * 50)
    assert not is_noisy([100.0] * 5 + [200.0] * 5)


def test_the_interval_of_a_median_is_of_order_statistics():
    found = median_interval([float(i) for i in range(20)], 0.05)
    assert (found.low, found.median, found.high) == (5.0, 9.5, 14.0)  # the table of the sign test, n 20
    assert found.confidence == pytest.approx(1 - 0.0414, abs=1e-4)


def test_too_few_values_give_no_interval():
    found = median_interval([1.0, 2.0, 3.0], 0.05)
    assert (found.low, found.high) == (-math.inf, math.inf)


def test_the_interval_holds_the_true_median_as_often_as_it_says():
    draw = random.Random(0)
    held = 0
    for _ in range(2000):
        found = median_interval([draw.lognormvariate(0, 1) for _ in range(21)])  # skewed; its median is 1
        held += found.low <= 1 <= found.high
    assert held / 2000 >= 0.95
