"""What workers say of their own work in a round, by a clock that the test moves: a step takes a second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import paceline as pl
from paceline import sync
from paceline.records import Round
from tests.laws.test_apart import Watched, clock
from tests.pool import Pool
from tests.problems import data, mlp

ROLES: dict[str, Callable[[], sync.LocalSGD]] = {
    "rounds": lambda: sync.LocalSGD(4),
    "overlap": lambda: sync.LocalSGD(4, overlap=2),
    "seconds": lambda: sync.LocalSGD(sync.Seconds(4.0)),
    "sites": lambda: sync.Hierarchical(2, 4, site="ab"[int(os.environ["RANK"]) // 2]),
}


def loop(run: pl.Run, steps: int, leave_at: int, early: bool, spend: Callable[[float], None]) -> None:
    for step in run.steps(steps=steps):
        run.optimizer.zero_grad()
        for x, y in step:
            step.backward(F.cross_entropy(run.model(x), y))
        spend(0.75)
        if early and step.index == leave_at:
            break
        run.optimizer.step()
        spend(0.25)
        if step.index == leave_at:
            break


def worked(kind: str, leave_at: int, early: bool) -> list[list[float]]:
    """The seconds of all workers in every round; worker 1 leaves, then all train on in another loop."""
    found: list[list[float]] = []

    def see(round: Round) -> None:
        found.append([note.busy_seconds for note in round.notes])

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"balance": Watched(see), "sync": ROLES[kind](), "deadline": 20.0}
    with clock(moved=True) as spend, pl.Run(model, optimizer, data(1000), batch=12, **settings) as run:
        loop(run, 40, leave_at if run.fleet.rank == 1 else -1, early, spend)
        loop(run, run.progress.step + 8, -1, False, spend)
    return found


# The last quarter of a second of a round is spent when it is over: it counts for the next one of the loop.
@pytest.mark.parametrize(
    ("kind", "early", "first"),
    [
        ("rounds", False, [3.75, 1.75, 3.75]),
        ("rounds", True, [3.75, 0.75, 3.75]),
        ("seconds", False, [3.75, 1.75, 3.75]),
        ("seconds", True, [3.75, 0.75, 3.75]),
        ("sites", False, [3.75, 1.75, 3.75]),
        ("sites", True, [3.75, 0.75, 3.75]),
    ],
)
def test_seconds_after_one_has_left(pool: Pool, kind: str, early: bool, first: list[float]) -> None:
    """Those of the round that it left, by what it did of it, and of the next loop's rounds, on all workers."""
    expected = [first, [3.75] * 3, [4.0] * 3]
    for found in pool.run(3, worked, kind, 1, early):
        assert len(found) == 3
        for seconds, want in zip(found, expected, strict=True):
            assert seconds == pytest.approx(want, abs=1e-9)


def test_seconds_after_one_has_left_while_an_average_was_under_way(pool: Pool) -> None:
    """It learns of three rounds at once: that of the average under way, its own last, and what others do then."""
    first, second, third = pool.run(3, worked, "overlap", 4, False)
    assert first == third
    assert first == [[3.75] * 3, [6.0, 1.0, 6.0], [3.75] * 3, [4.0] * 3]
    assert second == [[9.75, 4.75, 9.75], [3.75] * 3, [4.0] * 3]


def waits_for_a_slow_one() -> list[float]:
    """The seconds of worker 0 in every round, beside one that sleeps; by real clocks."""
    found: list[float] = []
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = Watched(lambda round: found.append(round.notes[0].busy_seconds))
    settings: dict[str, Any] = {"balance": watched, "sync": sync.LocalSGD(2, overlap=1), "deadline": 20.0}
    with pl.Run(model, optimizer, data(100), batch=12, **settings) as run:
        for step in run.steps(steps=6):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            if run.fleet.rank == 1:
                time.sleep(1.0)
            optimizer.step()
    return found


def test_to_wait_where_the_first_average_sets_off_is_no_work(pool: Pool) -> None:
    """All compare there what they will average: who is fast waits for the slow one, two seconds here."""
    found, _ = pool.run(2, waits_for_a_slow_one)
    assert max(found) < 1.0
