"""What the benchmark of shares tells is what the steps say."""

from __future__ import annotations

import pytest

from benchmarks import balance
from benchmarks.contestants import ROSTER, UNEVEN
from paceline.events import StepDone
from paceline.lab import Cluster


def step(at: int, seconds: float = 1.0) -> StepDone:
    """Step number ``at``, from ``at`` seconds on."""
    return StepDone(
        time=1000.0 + (at + 1) * seconds,
        step=at,
        epoch=0,
        examples=0,
        batch=90,
        loss=1.0,
        learning_rate=0.1,
        seconds=seconds,
        counts=[60, 30],
        load_seconds=[0.0, 0.0],
        compute_seconds=[0.8, 1.0],
        wait_seconds=[0.2, 0.0],
        communicate_seconds=0.0,
        bytes_sent=0,
        applied=True,
        efficiency=0.9,
    )


def test_a_stretch_of_steps() -> None:
    found = balance.look_at([step(0), step(1, seconds=3.0)], possible=50.0)
    assert found == {
        "examples_per_second": 45.0,
        "efficiency": 0.9,  # 180 examples in 4 seconds
        "recorded_efficiency": 0.9,
        "waiting": [0.1, 0.0],
        # Of their mean times the two took 4/9 and 14/9, and 1/2 and 3/2.
        "waiting_in_hindsight": [0.027, 0.027],
        "shares": [60.0, 30.0],
        "seconds": 4.0,
    }


def test_stretches_begin_two_looks_after_a_change() -> None:
    found = balance.stretches("disturbed", 10, [step(at) for at in range(150)], began=1000.0)
    assert {what: (some[0].step, some[-1].step, part) for what, (some, part) in found.items()} == {
        "before": (20, 58, 1.0),
        "disturbed": (80, 88, pytest.approx(5 / 6)),
        "after": (110, 149, 1.0),
    }
    found = balance.stretches("uneven", 10, [step(at) for at in range(50)], began=1000.0)
    assert [len(some) for some, _ in found.values()] == [10, 30]


@pytest.mark.parametrize("name", ["uneven", "disturbed", "even"])
def test_the_clusters_leave_something_to_the_machine(name: str) -> None:
    found = balance.cluster(name)
    assert isinstance(found, Cluster)
    assert sum(worker.cpu for worker in found.workers) <= 1.75


def test_all_peers_meet_shares_by_speed() -> None:
    names = [one.name for one in UNEVEN]
    assert [name for name in names if not name.startswith("paceline")] == [
        one.name for one in ROSTER if not one.name.startswith("paceline")
    ]
    assert {"paceline-all-reduce", "paceline-by-speed", "paceline-local-sgd-by-speed"} <= set(names)
