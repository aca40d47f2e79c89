"""From steps to events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from paceline.clock import Clock
from paceline.record import folder
from paceline.records import Event, Progress, StepDone
from paceline.roles import Recorder, Sync
from paceline.step import Phase, Step

__all__ = ["Journal"]


class Journal:
    """Hands the events of a run to its recorders; on other workers than rank 0 nothing is recorded."""

    def __init__(self, record: Sequence[Recorder] | str | Path, rank: int) -> None:
        self._recorders: list[Recorder] = []
        if rank == 0:
            self._recorders += folder(record) if isinstance(record, str | Path) else record
        self._began = time.perf_counter()

    def write(self, event: Event) -> None:
        """Record an event."""
        for recorder in self._recorders:
            recorder.record(event)

    def begin_step(self) -> None:
        """A step begins now."""
        self._began = time.perf_counter()

    def step_done(self, step: Step, progress: Progress, clock: Clock, sync: Sync, learning_rate: float) -> None:
        """Record a finished step; ``progress`` is that after it."""
        if not self._recorders:
            return
        assert step.round is not None
        notes, waits = step.round.notes, step.round.waits
        self.write(
            StepDone(
                time=time.time(),
                step=step.index,
                epoch=step.epoch,
                examples=progress.examples,
                batch=step.plan.batch,
                loss=step.round.loss,
                learning_rate=learning_rate,
                seconds=time.perf_counter() - self._began,
                counts=list(step.plan.counts),
                load_seconds=[note.load_seconds for note in notes],
                compute_seconds=[note.compute_seconds for note in notes],
                wait_seconds=list(waits),
                communicate_seconds=max(0.0, clock.exchange - waits[0]),
                bytes_sent=sync.bytes_sent,
                applied=step.phase is Phase.APPLIED,
                stats=step.round.stats,
            )
        )

    def close(self) -> None:
        """Finish all recorders."""
        for recorder in self._recorders:
            recorder.close()
        self._recorders = []
