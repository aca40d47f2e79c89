"""Shares by speed: whole, within bounds, exact in their sum, and the best that there are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline as pl
from paceline.balance import Even
from paceline.balance.rounding import largest_remainder
from paceline.balance.solver import Speed, equal_finish, finish, makespan

speeds = st.builds(Speed, st.one_of(st.just(0.0), st.floats(0.0, 5.0)), st.floats(0.01, 10.0))


def test_the_example_of_the_paper() -> None:
    exact = [13.7, 16.5, 19.6, 14.2]
    assert largest_remainder(64, exact) == [14, 16, 20, 14]
    assert equal_finish(64, [Speed(0.0, 1 / share) for share in exact]) == [14, 16, 20, 14]


@given(st.integers(0, 3000), st.integers(1, 9), speeds)
def test_equal_workers_get_equal_shares(total: int, workers: int, speed: Speed) -> None:
    assert equal_finish(total, [speed] * workers) == Even().split(total, workers)


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, list[Speed], list[int], list[int]]:
    many = draw(st.lists(speeds, min_size=1, max_size=6))
    lower = [draw(st.integers(0, 5)) for _ in many]
    upper = [low + draw(st.integers(0, 60)) for low in lower]
    return draw(st.integers(sum(lower), sum(upper))), many, lower, upper


@given(problems(), st.integers(1, 8))
def test_whole_within_bounds_and_exact_in_sum(
    problem: tuple[int, list[Speed], list[int], list[int]], multiple: int
) -> None:
    total, many, lower, upper = problem
    shares = equal_finish(total, many, lower, upper, multiple)
    assert sum(shares) == total
    assert all(isinstance(share, int) for share in shares)
    assert all(low <= share <= high for low, share, high in zip(lower, shares, upper, strict=True))


@given(st.integers(1, 500), st.lists(st.floats(0.01, 10.0), min_size=2, max_size=6))
def test_who_is_faster_does_not_get_less(total: int, each: list[float]) -> None:
    shares = equal_finish(total, [Speed(0.0, one) for one in each])
    for (mine, share), (theirs, other) in itertools.combinations(zip(each, shares, strict=True), 2):
        if mine < theirs * (1 - 1e-9):
            assert share >= other
        elif theirs < mine * (1 - 1e-9):
            assert other >= share


def best(total: int, many: list[Speed], lower: list[int], upper: list[int]) -> float:
    """By trying everything."""
    ranges = [range(low, high + 1) for low, high in zip(lower, upper, strict=True)]
    return min(makespan(many, shares) for shares in itertools.product(*ranges) if sum(shares) == total)


@settings(deadline=None)
@given(
    st.lists(speeds, min_size=2, max_size=3),
    st.lists(st.integers(1, 2), min_size=3, max_size=3),
    st.lists(st.integers(2, 8), min_size=3, max_size=3),
    st.floats(0, 1),
)
def test_optimal_against_brute_force(many: list[Speed], least: list[int], room: list[int], part: float) -> None:
    lower = least[: len(many)]
    upper = [low + more for low, more in zip(lower, room, strict=False)]
    total = sum(lower) + round(part * (sum(upper) - sum(lower)))
    shares = equal_finish(total, many, lower, upper)
    assert makespan(many, shares) == pytest.approx(best(total, many, lower, upper))


def test_whole_micro_batches() -> None:
    shares = equal_finish(512, [Speed(0.0, 1.0), Speed(0.0, 2.0), Speed(0.0, 4.0)], multiple=32)
    assert shares == [320, 128, 64]  # as good as [288, 160, 64]: 320 seconds
    shares = equal_finish(520, [Speed(0.0, 1.0), Speed(0.0, 2.0), Speed(0.0, 4.0)], multiple=32)
    assert sum(shares) == 520
    assert sum(share % 32 != 0 for share in shares) == 1


def test_fixed_time_counts() -> None:
    # In real numbers both finish at T = (90 + 10 / 1) / 2 = 50.
    assert equal_finish(90, [Speed(0.0, 1.0), Speed(10.0, 1.0)]) == [50, 40]
    assert finish(Speed(10.0, 1.0), 0) == 0.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((10, [Speed(0.0, 0.0)]), "no time for an example"),
        ((10, [Speed(0.0, 1.0)], [11]), "too few"),
        ((10, [Speed(0.0, 1.0)] * 2, None, [4, 4]), "more than all workers can take"),
        ((10, [Speed(0.0, 1.0)], None, None, 0), "multiples of 0"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(pl.SettingError, match=words):
        equal_finish(*arguments)  # type: ignore[arg-type]
