"""From steps to events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from paceline.checkpoint import own_folder
from paceline.clock import Clock
from paceline.events import Event, StepDone
from paceline.record import folder
from paceline.records import Note, Progress, Round
from paceline.roles import Patient, Recorder, Sync

__all__ = ["Journal"]

APART = 1.05  # workers leave an exchange together, but for a moment
HOLD = 0.2  # seconds that a step is held back at most where there is no exchange, but for a step that takes longer


class Journal:
    """Hands the events of a run to its recorders: on rank 0, or with ``each`` on every worker.

    Then each worker has a folder of its own in the one that was given, and rank 0 alone the console. Recorders that
    have patience get a step while the workers wait for the next exchange, where it costs nobody's time.
    """

    def __init__(self, record: Sequence[Recorder] | str | Path, rank: int, each: bool = False) -> None:
        self._recorders: list[Recorder] = []
        if isinstance(record, str | Path) and each:
            self._recorders += folder(own_folder(Path(record), rank), shown=rank == 0)
        elif rank == 0 or each:
            self._recorders += folder(record) if isinstance(record, str | Path) else record
        self._prompt = [one for one in self._recorders if not _is_patient(one)]
        self._patient = [one for one in self._recorders if _is_patient(one)]
        self._held: list[Callable[[], Event]] = []
        self._held_since = 0.0
        self._began: float | None = None

    def write(self, event: Event) -> None:
        """Record an event, and before it what was held back."""
        self.catch_up()
        for recorder in self._recorders:
            recorder.record(event)

    def catch_up(self) -> None:
        """Hand over what was held back."""
        held, self._held = self._held, []
        for make in held:
            event = make()
            for recorder in self._patient:
                recorder.record(event)

    def begin_step(self) -> None:
        """A step begins now, and with it a round, if none is under way."""
        now = time.perf_counter()
        self._began = self._began or now
        if self._held and now - self._held_since > HOLD:
            self.catch_up()

    def round_done(
        self, round: Round, progress: Progress, clock: Clock, sync: Sync, learning_rate: float, applied: bool
    ) -> None:
        """Record a finished round, of one step or several; ``progress`` is that after it."""
        began, self._began = self._began or 0.0, None
        if not self._recorders:
            return
        now = time.perf_counter()
        facts = time.time(), now - began, clock.between, clock.exchange, sync.bytes_sent, learning_rate, applied
        make: Callable[[], Event] = partial(_step_done, round, progress, *facts)
        if self._prompt:
            event = make()
            for recorder in self._prompt:
                recorder.record(event)
            make = partial(_same, event)
        if self._patient:
            self._held_since = self._held_since if self._held else now
            self._held.append(make)

    def close(self) -> None:
        """Finish all recorders."""
        self.catch_up()
        for recorder in self._recorders:
            recorder.close()
        self._recorders, self._prompt, self._patient = [], [], []


def _same(event: Event) -> Event:
    return event


def _step_done(
    round: Round,
    progress: Progress,
    now: float,
    seconds: float,
    between: float,
    exchange: float,
    bytes_sent: int,
    learning_rate: float,
    applied: bool,
) -> StepDone:
    notes, waits = round.notes, list(round.waits)
    if not round.background:  # in the first step of a loop some begin later than others, and wait less
        own = [note.busy_seconds for note in notes]
        waits = [min(wait, max(0.0, between - busy)) for wait, busy in zip(waits, own, strict=True)]
    return StepDone(
        time=now,
        step=round.plan.step,
        epoch=round.plan.epoch,
        examples=progress.examples,
        batch=round.plan.batch,
        loss=round.loss,
        learning_rate=learning_rate,
        seconds=seconds,
        counts=[int(note.examples) for note in notes],
        load_seconds=[note.load_seconds for note in notes],
        compute_seconds=[note.compute_seconds for note in notes],
        wait_seconds=waits,
        communicate_seconds=max(0.0, exchange - waits[0]),
        bytes_sent=bytes_sent,
        applied=applied,
        stats=round.stats,
        steps=round.steps,
        drift=round.drift,
        efficiency=None if round.background else efficiency(notes, between),
    )


def _is_patient(recorder: Recorder) -> bool:
    return isinstance(recorder, Patient) and recorder.patient


def efficiency(notes: Sequence[Note], seconds: float) -> float | None:
    """Examples per second over the sum of what each worker would do if it never waited.

    None where workers did not begin together: then some were busy for longer than the time that rank 0 saw.
    """
    alone = sum(note.examples / note.busy_seconds for note in notes if note.busy_seconds > 0)
    if not alone or max(note.busy_seconds for note in notes) > APART * seconds:
        return None
    return sum(note.examples for note in notes) / seconds / alone
