"""Where things lie in a chart."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.compare.scale import Axis, axis_over, nice, spread


@pytest.mark.parametrize(("least", "found"), [(0.9, 1), (1, 1), (1.1, 2), (3, 5), (60, 100), (0.012, 0.02)])
def test_steps_of_an_axis(least: float, found: float) -> None:
    assert nice(least) == pytest.approx(found)


def test_values_become_pixels_and_stay_on_the_axis() -> None:
    up = Axis(0.0, 10.0, 5.0, begin=100.0, end=0.0)
    assert [up.at(value) for value in (0, 5, 10, 11, -1)] == [100, 50, 0, 0, 100]
    assert up.ticks() == [0, 5, 10]


def test_an_axis_of_whole_steps_holds_all_values() -> None:
    axis = axis_over(0.62, 0.97, 0, 1, whole=True, most=1.0)
    assert [axis.low, axis.high] == pytest.approx([0.6, 1.0])
    assert axis.ticks() == pytest.approx([0.6, 0.7, 0.8, 0.9, 1.0])
    assert axis_over(0, 0.987, 0, 1, whole=True, most=0.99).high == 0.99


def test_one_value_alone_has_an_axis_too() -> None:
    assert axis_over(3, 3, 0, 100).at(3) == 0
    assert axis_over(0, 0, 0, 100, whole=True).high == 1
    for share in (0.0, 0.5, 1.0):
        axis = axis_over(share, share, 0, 100, whole=True, most=1.0)
        assert axis.low < axis.high <= 1.5
        assert 0 <= axis.at(share) <= 100


numbers = st.floats(-1e6, 1e6)


@given(numbers, numbers)
def test_numbers_of_an_axis_lie_on_it(one: float, other: float) -> None:
    low, high = sorted((one, other))
    for whole in (False, True):
        axis = axis_over(low, high, 0, 100, whole=whole)
        assert 1 <= len(axis.ticks()) <= 8
        assert all(-1e-6 <= axis.at(value) <= 100 + 1e-6 for value in axis.ticks())


def test_names_do_not_lie_on_each_other() -> None:
    assert spread([100.0, 50.0, 102.0], 14, 260) == [100.0, 50.0, 114.0]
    assert spread([259.0, 260.0, 20.0], 14, 260) == [246.0, 260.0, 20.0]


@given(st.lists(st.floats(0, 200), max_size=12))
def test_names_keep_their_order_and_their_distance(wanted: list[float]) -> None:
    found = sorted(zip(spread(wanted, 10, 200), wanted, strict=True))
    assert all(after[0] - before[0] >= 10 - 1e-9 for before, after in pairwise(found))
    assert [one for _, one in found] == sorted(wanted)
    assert all(place <= 200 for place, _ in found)
