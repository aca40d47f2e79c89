"""What the benchmark of survivors tells is what has happened."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks import survive
from benchmarks.survive import Blow, Healed
from paceline.events import Event
from tests.record.fake import START, gossiped, started, step


@pytest.mark.parametrize("fault", survive.FAULTS)
def test_faults_are_drawn_by_the_seed(fault: str) -> None:
    plans = [survive.plan(fault, seed) for seed in range(50)]
    assert plans == [survive.plan(fault, seed) for seed in range(50)]
    if fault == "none":
        assert plans == [[]] * 50
        return
    assert len({str(plan) for plan in plans}) > 10
    for plan in plans:
        assert len({blow.target for blow in plan}) == len(plan)
        assert plan == sorted(plan)
        for blow in plan:
            begins, ends = survive.FOR_EVER if blow.seconds == math.inf else survive.PASSING
            assert begins <= blow.at <= ends


@pytest.mark.parametrize(("fault", "count"), [("kill 1", 1), ("kill 3", 3), ("kill 7", 7)])
def test_who_is_dead_stays_dead(fault: str, count: int) -> None:
    plans = [survive.plan(fault, seed) for seed in range(50)]
    assert {len(plan) for plan in plans} == {count}
    assert {blow.target for plan in plans for blow in plan} == set(range(survive.WORKERS))
    assert {(blow.do, blow.seconds) for plan in plans for blow in plan} == {("kill", math.inf)}


def test_two_sites_with_half_of_the_workers_each() -> None:
    cluster = survive.sites()
    assert [worker.site for worker in cluster.workers] == ["east"] * 4 + ["west"] * 4
    assert sum(worker.cpu for worker in cluster.workers) <= 2
    targets = {blow.target for seed in range(20) for blow in survive.plan("site", seed)}
    assert targets == {site.name for site in cluster.sites}


def exchanges(*met: tuple[float, int | None]) -> list[Event]:
    """Rounds that ended so many seconds after the start, with whom the last exchange was."""
    rounds = [gossiped(time=START + at, exchanges=int(who is not None), partner=who) for at, who in met]
    return [started(), step(0), *rounds]


def test_who_was_away_is_back_with_the_first_exchange_of_a_round_that_began_later() -> None:
    healed = Healed(START + 10, Blow(30, "freeze", 2, 5.0))
    events = {2: exchanges((9, 4), (11, 4), (12, None), (14.5, 1), (15, 4))}
    assert survive.back(healed, events) == 4.5
    assert survive.back(healed, {2: exchanges((9, 4), (11, 4), (12, None))}) is None


def test_a_site_is_back_when_every_worker_has_averaged_with_the_other_site() -> None:
    healed = Healed(START + 10, Blow(30, "cut", "east", 20.0))
    events = {rank: exchanges((11, None), (12, (rank + 4) % 8)) for rank in range(8)}
    assert survive.back(healed, events) == 2.0
    events[5] = exchanges((11, None), (12, 4), (13, 7), (17, 0))
    assert survive.back(healed, events) == 7.0
    events[5] = exchanges((11, None), (12, 4), (13, 7))
    assert survive.back(healed, events) is None


def found(**changes: Any) -> dict[str, Any]:
    return {"digests": 1, "stall": 0.4, "own stall": None, "back": [], "accuracy": 0.9, "seconds": 60.0, **changes}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"digests": 2}, "2 final models"),
        ({"stall": 2.3}, "a round took 2.3 s"),
        ({"back": [3.0, None]}, "who came back took no part again"),
        ({"accuracy": 0.89}, "1.00 points less"),
    ],
)
def test_what_is_wrong(changes: dict[str, Any], says: str) -> None:
    good = found(back=[3.0], accuracy=0.896)
    assert survive.wrong("freeze", [good, good], [found(), found()]) == []
    assert survive.wrong("freeze", [good, found(**changes)], [found(), found()]) == [f"freeze, training 1: {says}"]


def test_a_row() -> None:
    rows = [found(accuracy=0.898, back=[3.0], **{"own stall": 0.5}), found(accuracy=0.901, stall=0.6, back=[None])]
    told = survive.line("link", rows, [found(), found()])
    for each in ("0.60 s", "0.50", "3.0, never", "models 1", "89.95 %", "-0.05 (-0.20 … +0.10)"):
        assert each in told
