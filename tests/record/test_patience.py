"""Recorders that have patience get the steps of a moment together, in order, and miss nothing."""

from __future__ import annotations

import pytest

from paceline import record
from paceline.events import Ended, Event, Remark, StepDone
from paceline.journal import HOLD, Journal


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


def step(at: int, time: float) -> StepDone:
    return StepDone(
        time=time,
        step=at,
        epoch=0,
        examples=8 * at,
        batch=8,
        loss=1.0,
        learning_rate=0.1,
        seconds=0.01,
        counts=[8],
        load_seconds=[0.0],
        compute_seconds=[0.01],
        wait_seconds=[0.0],
        communicate_seconds=0.0,
        bytes_sent=0,
        applied=True,
    )


def test_steps_of_a_moment_come_together() -> None:
    at_once, told_so, later = Kept(None), Kept(False), Kept(True)
    journal = Journal([at_once, told_so, later], rank=0)
    steps = [step(at, 100.0 + 0.25 * HOLD * at) for at in range(10)]
    known = []
    for event in steps:
        journal.write(event)
        known.append(len(later.seen))
    assert at_once.seen == told_so.seen == steps
    assert known == [1, 1, 1, 1, 5, 5, 5, 5, 9, 9]
    journal.close()
    assert later.seen == steps
    assert later.closed


def test_steps_that_take_longer_come_at_once() -> None:
    later = Kept(True)
    journal = Journal([later], rank=0)
    for at in range(5):
        journal.write(step(at, 100.0 + 2 * HOLD * at))
        assert len(later.seen) == at + 1


@pytest.mark.parametrize("event", [Remark(100.02, 2, "slow"), Ended(100.02, 3, 24, "done")])
def test_nothing_else_waits_and_nothing_overtakes(event: Event) -> None:
    later = Kept(True)
    journal = Journal([later], rank=0)
    steps: list[Event] = [step(0, 100.0), step(1, 100.01)]
    for each in [*steps, event]:
        journal.write(each)
    assert later.seen == [*steps, event]


def test_a_clock_that_was_set_back_holds_nothing_back() -> None:
    later = Kept(True)
    journal = Journal([later], rank=0)
    journal.write(step(0, 100.0))
    journal.write(step(1, 50.0))
    assert len(later.seen) == 2


def test_who_has_patience() -> None:
    """Lines of JSON are what is left of a run that was killed: they are written at once."""
    assert not hasattr(record.JsonLines, "patient")
    assert all(kind.patient for kind in (record.Trace, record.TensorBoard, record.Console))
