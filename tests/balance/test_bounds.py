"""Bounds of shares: what is left of them where a step is too short."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.balance.bounds import Bounds, spare
from paceline.balance.solver import Speed


def test_the_slowest_get_nothing_until_the_rest_fits() -> None:
    speeds = [Speed(0.0, 2.0), Speed(0.0, 1.0), Speed(9.0, 1.0), Speed(0.0, 1.0)]
    least, most = [3, 3, 3, 3], [9, 9, 9, 9]
    assert spare(12, speeds, least, most) == (least, most)
    assert spare(11, speeds, least, most) == ([3, 3, 0, 3], [9, 9, 0, 9])
    assert spare(6, speeds, least, most) == ([0, 3, 0, 3], [0, 9, 0, 9])
    assert spare(5, speeds, least, most) == ([0, 3, 0, 0], [0, 9, 0, 0])  # of equal ones the higher rank
    assert spare(2, speeds, least, most) == ([0, 0, 0, 0], most)
    assert spare(11, speeds, least, [3, 3, 3, 3]) == ([0, 0, 0, 0], [3, 3, 3, 3])  # no room in the others


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(2, 9), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_as_many_as_can_have_a_share_have_one(batch: int, least: int, each: list[int]) -> None:
    shares = Bounds(least, (batch,) * len(each)).best(batch, [Speed(0.0, float(one)) for one in each])
    assert sum(shares) == batch
    if batch >= least:
        assert all(share == 0 or share >= least for share in shares)
        assert sum(share > 0 for share in shares) == min(batch // least, len(each))
