"""Recorders that have patience get a step while the workers wait for the next exchange, and miss nothing."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F

import paceline as pl
from paceline import record
from paceline.clock import Clock
from paceline.events import Ended, Event, Remark, StepDone
from paceline.journal import HOLD, Journal
from paceline.records import Note, Plan, Progress, Round
from tests.pool import Pool
from tests.problems import data, mlp


class Kept:
    def __init__(self, patient: bool | None) -> None:
        if patient is not None:
            self.patient = patient
        self.seen: list[Event] = []
        self.closed = False

    def record(self, event: Event) -> None:
        assert not self.closed
        self.seen.append(event)

    def close(self) -> None:
        self.closed = True

    @property
    def steps(self) -> list[int]:
        return [event.step for event in self.seen if isinstance(event, StepDone)]


def done(journal: Journal, at: int) -> None:
    """Step number ``at`` is done."""
    journal.begin_step()
    round = Round(Plan(at, 0, (0,), (8,), 8), (Note(examples=8.0, weight=8.0, busy_seconds=0.01),))
    journal.round_done(round, Progress(at + 1, 0, 8 * at + 8), Clock(), pl.sync.AllReduce(), 0.1, True)


def test_steps_are_held_back_for_who_has_patience() -> None:
    at_once, told_so, later = Kept(None), Kept(False), Kept(True)
    journal = Journal([at_once, told_so, later], rank=0)
    for at in range(3):
        done(journal, at)
    assert at_once.steps == told_so.steps == [0, 1, 2]
    assert later.steps == []
    journal.catch_up()
    assert later.seen == at_once.seen == told_so.seen
    done(journal, 3)
    journal.close()
    assert later.steps == [0, 1, 2, 3]
    assert later.closed


def test_where_nothing_is_exchanged_they_come_after_a_while() -> None:
    later = Kept(True)
    journal = Journal([later], rank=0)
    done(journal, 0)
    done(journal, 1)
    time.sleep(1.1 * HOLD)
    journal.begin_step()
    assert later.steps == [0, 1]


@pytest.mark.parametrize("event", [Remark(100.0, 2, "slow"), Ended(100.0, 3, 24, "done")])
def test_nothing_else_waits_and_nothing_overtakes(event: Event) -> None:
    later = Kept(True)
    journal = Journal([later], rank=0)
    done(journal, 0)
    done(journal, 1)
    journal.write(event)
    assert later.steps == [0, 1]
    assert later.seen[2:] == [event]


def test_who_has_patience() -> None:
    assert all(kind.patient for kind in (record.JsonLines, record.Trace, record.TensorBoard, record.Console))


def known_in_each_step(role: str) -> list[int]:
    """How many steps a recorder with patience knows of at the end of the inner loop of each step."""
    model, kept, found = mlp(), Kept(True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = pl.sync.LocalSGD(4, overlap=2) if role == "overlap" else None
    with pl.Run(model, optimizer, data(64), batch=8, sync=sync, record=[kept]) as run:
        for step in run.steps(epochs=1):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            found.append(len(kept.steps))
            optimizer.step()
    return [*found, len(kept.steps)]


def test_a_step_is_recorded_during_the_exchange_of_the_next(pool: Pool) -> None:
    first, second = pool.run(2, known_in_each_step, "plain")
    assert first == [*range(8), 8]
    assert second == [0] * 9  # only rank 0 records


def test_averages_in_the_background_leave_recorders_alone(pool: Pool) -> None:
    """They wait in a thread of their own, where recorders must not be called."""
    assert pool.run(2, known_in_each_step, "overlap")[0][-1] == 2
