"""Whole parts of a whole: the sum is kept, and no part is further than one from the exact one."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.balance.rounding import largest_remainder

TOTALS = st.integers(0, 2**40)  # a double holds the exact parts of more examples than any data set has
COUNTS = st.lists(st.integers(0, 10**6), min_size=1, max_size=12).filter(any)
SPEEDS = st.lists(st.just(0.0) | st.floats(1e-6, 1e6), min_size=1, max_size=12).filter(any)


@pytest.mark.parametrize(
    ("total", "weights", "parts"),
    [
        (64, [13.7, 16.5, 19.6, 14.2], [14, 16, 20, 14]),
        (7, [1, 1, 1], [3, 2, 2]),
        (2, [5, 5, 5], [1, 1, 0]),
        (10, [0, 1, 0], [0, 10, 0]),
        (0, [2, 3], [0, 0]),
        (6, [1, 2, 3], [1, 2, 3]),
        (100, [1e-9, 1.0], [0, 100]),
    ],
)
def test_by_hand(total: int, weights: list[float], parts: list[int]) -> None:
    assert largest_remainder(total, weights) == parts


@given(TOTALS, COUNTS | SPEEDS)
def test_the_sum_is_exact_and_parts_are_rounded_down_or_up(total: int, weights: list[float]) -> None:
    parts = largest_remainder(total, weights)
    assert sum(parts) == total
    whole = sum(map(Fraction, weights))
    for part, weight in zip(parts, weights, strict=True):
        assert part - floor(total * Fraction(weight) / whole) in (0, 1)


@given(TOTALS, COUNTS)
def test_the_largest_remainders_are_rounded_up(total: int, weights: list[int]) -> None:
    exact = [Fraction(total * weight, sum(weights)) for weight in weights]
    over = [one - floor(one) for one in exact]
    up = [part > floor(one) for part, one in zip(largest_remainder(total, weights), exact, strict=True)]
    # As doubles, remainders of parts as large as these are told apart down to a few thousandths.
    near = Fraction(1, 256)
    assert max((o for o, u in zip(over, up, strict=True) if not u), default=Fraction(0)) <= near + min(
        (o for o, u in zip(over, up, strict=True) if u), default=Fraction(1)
    )


@given(TOTALS, COUNTS | SPEEDS)
def test_who_weighs_more_does_not_get_less(total: int, weights: list[float]) -> None:
    parts = largest_remainder(total, weights)
    by_weight = sorted(zip(weights, parts, strict=True))
    assert [part for _, part in by_weight] == sorted(parts)


@given(TOTALS, st.integers(1, 12), st.floats(1e-6, 1e6))
def test_equal_weights_are_equal_up_to_one(total: int, size: int, weight: float) -> None:
    share, rest = divmod(total, size)
    assert largest_remainder(total, [weight] * size) == [share + (place < rest) for place in range(size)]
