"""Forecasts from measurements: by hand, and what must hold for all."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.balance.solver import Speed, finish
from paceline.survey import Survey, forecasts, recommend
from paceline.survey.predict import EVERY, NEAR, fit


def survey(speeds: list[Speed], sums: float = 0.0, coded: float = 0.0, exchange: float = 0.0) -> Survey:
    return Survey(
        examples=6400,
        batch=64,
        model_bytes=4_000_000,
        speeds=speeds,
        steps=[],
        sum_seconds=sums,
        coded_seconds=coded,
        exchange_seconds=[exchange] * len(speeds),
        links=[],
    )


def seconds(found: Survey) -> dict[str, float]:
    return {each.name: each.seconds for each in forecasts(found)}


def test_two_workers_by_hand() -> None:
    # 32 examples take 1 + 32 * 0.125 = 5 s and 1 + 32 * 0.25 = 9 s. By speed: 1 + n / 8 = 1 + (64 - n) / 4 with
    # n = 42.67, so 43 and 21 examples, which take 6.375 and 6.25 s.
    found = seconds(survey([Speed(1.0, 0.125), Speed(1.0, 0.25)], sums=2.0, coded=1.0, exchange=4.0))
    steps, alone = 100, 6400 / (32 / 5 + 32 / 9)
    assert found == {
        "all-reduce": steps * (9 + 2.0),
        "balance": steps * (6.375 + 2.0),
        "local": steps * 9 + steps / EVERY * 2.0,
        "local, 8 bit": steps * 9 + steps / EVERY * 1.0,
        "local by time": pytest.approx(alone + steps / EVERY * 1.0),
        "gossip": pytest.approx(6400 / (32 / (5 + 8 / EVERY) + 32 / (9 + 8 / EVERY))),
    }


@pytest.mark.parametrize(
    ("speeds", "sums", "coded", "best"),
    [
        ([Speed(0.01, 0.001)] * 4, 0.0005, 0.001, "all-reduce"),
        ([Speed(0.01, 0.001), Speed(0.01, 0.004)], 0.0005, 0.001, "balance"),
        ([Speed(0.01, 0.001)] * 4, 0.015, 0.02, "local"),
        ([Speed(0.01, 0.001)] * 4, 0.1, 0.01, "local, 8 bit"),
        ([Speed(0.01, 0.001), Speed(0.01, 0.004)], 1.0, 0.01, "local by time"),
        ([Speed(0.01, 0.001), Speed(0.01, 0.004)], 10.0, 5.0, "gossip"),
    ],
)
def test_every_cluster_has_its_method(speeds: list[Speed], sums: float, coded: float, best: str) -> None:
    assert recommend(forecasts(survey(speeds, sums, coded, exchange=0.002))).name == best


times = st.floats(1e-5, 10.0)


@given(st.lists(st.builds(Speed, times, times), min_size=1, max_size=6), times, times, times)
def test_what_waits_less_takes_less(speeds: list[Speed], sums: float, coded: float, exchange: float) -> None:
    made = survey(speeds, sums, coded, exchange)
    found = seconds(made)
    assert found["balance"] <= found["all-reduce"] * (1 + 1e-9)
    assert found["local"] <= found["all-reduce"] * (1 + 1e-9)
    # Nobody can do more than all do who never wait.
    share = made.batch / len(speeds)
    whole = sum(share / finish(speed, share) for speed in speeds)
    assert found["gossip"] >= 0.9 * made.examples / whole  # shares are whole, so up to one example off
    chosen = recommend(forecasts(made))
    assert chosen.seconds <= NEAR * min(found.values())
    assert all(math.isfinite(each) and each > 0 for each in found.values())


@given(times, times, st.lists(st.integers(1, 4096), min_size=2, max_size=6, unique=True))
def test_a_line_is_found_again(fixed: float, each: float, sizes: list[int]) -> None:
    line = Speed(fixed, each)
    found = fit([(size, finish(line, size)) for size in sizes])
    for size in sizes:
        assert finish(found, size) == pytest.approx(finish(line, size), rel=1e-6)


@given(st.lists(st.tuples(st.integers(1, 100), times), min_size=1, max_size=6))
def test_no_line_promises_less_than_nothing(points: list[tuple[int, float]]) -> None:
    found = fit(points)
    assert found.fixed >= 0
    assert found.per_example >= 0
    assert finish(found, 1) > 0


def test_steps_that_more_examples_make_no_longer() -> None:
    flat = fit([(1, 0.03), (2, 0.02), (4, 0.01)])
    assert flat.per_example > 0
    assert finish(flat, 4) == pytest.approx(finish(flat, 1), rel=1e-4)
    assert recommend(forecasts(survey([flat, flat]))).name == "all-reduce"


def test_a_survey_is_kept_as_json() -> None:
    made = survey([Speed(0.5, 0.25)])
    assert msgspec.json.decode(msgspec.json.encode(made), type=Survey) == made
