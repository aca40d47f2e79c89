"""Ranges are lists of positions, written shortly."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.ranges import Ranges, drop, part, simplified


def positions(ranges: Ranges) -> list[int]:
    return [at for start, stop in ranges for at in range(start, stop)]


@st.composite
def ascending(draw: st.DrawFn) -> Ranges:
    """Ranges as an epoch has them: one behind the other, with or without gaps, some of them empty."""
    bounds = list(accumulate(draw(st.lists(st.integers(0, 4), max_size=16))))
    return tuple(zip(bounds[::2], bounds[1::2], strict=False))


@given(ascending(), st.integers(0, 40), st.integers(0, 40))
def test_part(ranges: Ranges, start: int, stop: int) -> None:
    found = part(ranges, start, stop)
    assert positions(found) == positions(ranges)[start:stop]
    assert all(first < last for first, last in found)


@given(ascending(), st.integers(0, 40))
def test_drop(ranges: Ranges, count: int) -> None:
    assert positions(drop(ranges, count)) == positions(ranges)[count:]


@given(ascending(), st.integers(0, 3))
def test_simplified(ranges: Ranges, beyond: int) -> None:
    """Nothing is lost but what the length of the epoch tells: then it is nothing, or the whole rest of it."""
    found, left = simplified(ranges, length := (max([0, *positions(ranges)]) + 1 + beyond)), positions(ranges)
    if found:
        assert positions(found) == left
        assert all(first < last for first, last in found)
        assert all(one[1] < other[0] for one, other in pairwise(found))
        assert found[0][1] < length
    else:
        assert left == (list(range(left[0], length)) if left else [])


def test_by_hand() -> None:
    assert part(((2, 5), (7, 9)), 2, 4) == ((4, 5), (7, 8))
    assert drop(((2, 5), (7, 9)), 3) == ((7, 9),)
    assert simplified([(2, 5), (5, 5), (5, 7), (8, 9)], 9) == ((2, 7), (8, 9))
    assert simplified([(2, 5), (5, 9)], 9) == ()
    assert simplified([(2, 5), (5, 9)], 10) == ((2, 9),)
