"""What the soak tells is what has happened."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import soak
from benchmarks.growth import WARM_UP, Growth, Sample, growth, longest_stall
from tests.record.fake import START, started, step


def test_a_fault_every_ten_seconds_and_time_to_come_back() -> None:
    faults = soak.plan(600.0, seed=0)
    assert [fault.at for fault in faults] == [10.0 * number for number in range(1, 60)]
    assert {fault.worker for fault in faults} == set(range(soak.WORKERS))
    assert all(fault.frozen for fault in faults if fault.worker == soak.WITNESS)
    assert {bool(fault.frozen) for fault in faults} == {True, False}
    assert faults == soak.plan(600.0, seed=0) != soak.plan(600.0, seed=1)


def samples(count: int, **grows: float) -> list[Sample]:
    """One a second; what grows does so by this much in a second."""
    first = Sample(START, 100.0, 40, 12, 8, True)
    more = {name: getattr(first, name) for name in Growth._fields}
    return [
        first._replace(time=START + at, **{name: more[name] + at * grows.get(name, 0) for name in more})
        for at in range(count)
    ]


def test_what_grows_is_seen_and_what_does_not_is_not() -> None:
    assert growth(samples(60)) == Growth(0, 0, 0, 0)
    found = growth(samples(61, megabytes=0.5, descriptors=1, threads=2))
    assert found == Growth(15.0, 30, 0, 60)  # 45 after the warm-up: thirds of 15, whose middles are 30 apart


def test_warm_up_and_moments_in_which_one_is_missing_do_not_count() -> None:
    disturbed = [each._replace(descriptors=90, calm=False) if at % 2 else each for at, each in enumerate(samples(90))]
    noisy = [each._replace(threads=50) if each.time <= START + WARM_UP else each for each in disturbed]
    assert growth(noisy) == Growth(0, 0, 0, 0)
    assert growth(samples(int(WARM_UP) + 9)) is None


def test_a_stall_is_between_steps_of_one_life_and_without_the_own_freeze() -> None:
    events = [
        *(started(), step(0, time=START + 60), step(1, time=START + 61)),
        *(step(2, time=START + 66), step(3, time=START + 68.5)),
        *(started(), step(0, time=START + 100)),
    ]
    assert longest_stall(events, []) == 5.0
    assert longest_stall(events, [(START + 61.5, START + 65.5), (START + 90, START + 95)]) == 2.5


def found(**changes: Any) -> dict[str, Any]:
    rows = [{"worker": rank, "growth": dict.fromkeys(Growth._fields, 0.0)} for rank in range(soak.WORKERS)]
    return {"digests": 1, "workers": rows, **changes}


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [("megabytes", 11.0, "11 megabytes"), ("sockets", 3, "3 sockets"), ("threads", 1, "1 threads")],
)
def test_what_is_too_much(name: str, more: float, says: str) -> None:
    assert soak.faults_of(found()) == []
    grown = found()
    grown["workers"][1]["growth"][name] = more
    assert soak.faults_of(grown) == [f"worker 1 has {says} more at the end"]


def test_models_that_differ_and_a_witness_that_is_missing() -> None:
    bad = found(digests=2)
    bad["workers"][soak.WITNESS]["growth"] = None
    bad["workers"][0]["growth"] = None  # it was started again just before the end
    assert soak.faults_of(bad) == [
        "there are 2 final models",
        "nobody has lived for long enough to say whether something grows",
    ]
