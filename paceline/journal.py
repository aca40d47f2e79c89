"""From steps to events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from paceline.clock import Clock
from paceline.events import Event, StepDone
from paceline.record import folder
from paceline.records import Note, Progress, Round
from paceline.roles import Patient, Recorder, Sync

__all__ = ["Journal"]

APART = 1.05  # workers leave an exchange together, but for a moment
HOLD = 0.2  # seconds that steps are held back for recorders with patience: many at once cost less than one by one


class Journal:
    """Hands the events of a run to its recorders; on other workers than rank 0 nothing is recorded."""

    def __init__(self, record: Sequence[Recorder] | str | Path, rank: int) -> None:
        self._recorders: list[Recorder] = []
        if rank == 0:
            self._recorders += folder(record) if isinstance(record, str | Path) else record
        self._prompt = [one for one in self._recorders if not _is_patient(one)]
        self._patient = [one for one in self._recorders if _is_patient(one)]
        self._held: list[Event] = []
        self._handed = 0.0
        self._began: float | None = None

    def write(self, event: Event) -> None:
        """Record an event; steps reach recorders that have patience a moment later."""
        for recorder in self._prompt:
            recorder.record(event)
        if not self._patient:
            return
        self._held.append(event)
        # A clock that was set back must not hold them until it has caught up.
        if not isinstance(event, StepDone) or not 0 <= event.time - self._handed < HOLD:
            self._handed = event.time
            self._hand_over()

    def _hand_over(self) -> None:
        held, self._held = self._held, []
        for recorder in self._patient:
            for event in held:
                recorder.record(event)

    def begin_step(self) -> None:
        """A step begins now, and with it a round, if none is under way."""
        self._began = self._began or time.perf_counter()

    def round_done(
        self, round: Round, progress: Progress, clock: Clock, sync: Sync, learning_rate: float, applied: bool
    ) -> None:
        """Record a finished round, of one step or several; ``progress`` is that after it."""
        began, self._began = self._began or 0.0, None
        if not self._recorders:
            return
        notes, waits = round.notes, list(round.waits)
        if not round.background:  # in the first step of a loop some begin later than others, and wait less
            own = [note.busy_seconds for note in notes]
            waits = [min(wait, max(0.0, clock.between - busy)) for wait, busy in zip(waits, own, strict=True)]
        self.write(
            StepDone(
                time=time.time(),
                step=round.plan.step,
                epoch=round.plan.epoch,
                examples=progress.examples,
                batch=round.plan.batch,
                loss=round.loss,
                learning_rate=learning_rate,
                seconds=time.perf_counter() - began,
                counts=[int(note.examples) for note in notes],
                load_seconds=[note.load_seconds for note in notes],
                compute_seconds=[note.compute_seconds for note in notes],
                wait_seconds=waits,
                communicate_seconds=max(0.0, clock.exchange - waits[0]),
                bytes_sent=sync.bytes_sent,
                applied=applied,
                stats=round.stats,
                steps=round.steps,
                drift=round.drift,
                efficiency=None if round.background else _efficiency(notes, clock.between),
            )
        )

    def close(self) -> None:
        """Finish all recorders."""
        self._hand_over()
        for recorder in self._recorders:
            recorder.close()
        self._recorders, self._prompt, self._patient = [], [], []


def _is_patient(recorder: Recorder) -> bool:
    return isinstance(recorder, Patient) and recorder.patient


def _efficiency(notes: Sequence[Note], seconds: float) -> float | None:
    """None where workers did not begin together: then some were busy for longer than the time that rank 0 saw."""
    alone = sum(note.examples / note.busy_seconds for note in notes if note.busy_seconds > 0)
    if not alone or max(note.busy_seconds for note in notes) > APART * seconds:
        return None
    return sum(note.examples for note in notes) / seconds / alone
