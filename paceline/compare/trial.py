"""What one training came to, by its record: points of its accuracy, and what each worker did when."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline import record
from paceline.errors import PacelineError
from paceline.events import Event, Measured, StepDone
from paceline.record.pace import Pace

__all__ = ["Piece", "Point", "Trial", "read_trial"]

ACCURACY = ("test_accuracy", "accuracy")
"""The names that ``run.log`` may have got an accuracy under, the first that is there counts."""
EVALUATION = "evaluation_seconds"
"""The name for the time in which all workers stood still to evaluate: it is no time of training."""


class Point(NamedTuple):
    """An accuracy, and what had been spent until then."""

    seconds: float
    examples: int
    bytes_sent: int
    accuracy: float


class Piece(NamedTuple):
    """One step or round of one worker; all but ``examples`` and ``batch`` in seconds of training."""

    begin: float
    seconds: float
    examples: int
    batch: int
    load: float
    compute: float
    wait: float
    communicate: float


@dataclass(frozen=True)
class Trial:
    """One training of one contestant."""

    label: str
    seed: int
    points: tuple[Point, ...] = ()
    workers: tuple[tuple[Piece, ...], ...] = ()
    """What each did, by rank."""
    bytes_sent: int = 0
    """By rank 0."""
    efficiency: float | None = None
    error: str | None = None
    """Why it failed; then the rest may be missing."""

    @property
    def seconds(self) -> float:
        """The time of training."""
        return max((pieces[-1].begin + pieces[-1].seconds for pieces in self.workers if pieces), default=0.0)

    @property
    def examples(self) -> int:
        """Examples that all workers have used."""
        return sum(piece.examples for pieces in self.workers for piece in pieces)

    @property
    def waiting(self) -> float:
        """The share of all workers' time in which they waited for others."""
        whole = sum(piece.seconds for pieces in self.workers for piece in pieces)
        return sum(piece.wait for pieces in self.workers for piece in pieces) / whole if whole else 0.0

    @property
    def accuracy(self) -> float | None:
        """The last that was measured."""
        return self.points[-1].accuracy if self.points else None

    def seconds_to(self, target: float) -> float | None:
        """When an accuracy was first reached; None if it was not."""
        return next((point.seconds for point in self.points if point.accuracy >= target), None)


class _Reader:
    """Goes through the events of one file."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.workers: list[list[Piece]] = []
        self.pace, self.bytes_sent = Pace(), 0
        self._now, self._examples, self._done = 0.0, 0, 0
        self._still = 0.0
        self._early: list[float] = []

    def read(self, events: Iterable[Event]) -> _Reader:
        for event in events:
            if isinstance(event, StepDone):
                self._step(event)
            elif isinstance(event, Measured):
                self._measured(event)
        self._place_early()
        return self

    def _measured(self, event: Measured) -> None:
        self._still += max(0.0, event.values.get(EVALUATION, 0.0))
        self._early += [event.values[name] for name in ACCURACY if name in event.values][:1]
        if event.step <= self._done:
            self._place_early()

    def _place_early(self) -> None:
        """A number that was logged in the body of a step stands before that step in the file, but belongs behind it."""
        self.points += [Point(self._now, self._examples, self.bytes_sent, value) for value in self._early]
        self._early = []

    def _step(self, event: StepDone) -> None:
        seconds, self._still = max(0.0, event.seconds - self._still), 0.0
        self.workers.extend([] for _ in range(len(self.workers), len(event.counts)))
        rows = zip(event.counts, event.load_seconds, event.compute_seconds, event.wait_seconds, strict=True)
        for pieces, (count, load, compute, wait) in zip(self.workers, rows, strict=False):
            spent = load, compute, wait, event.communicate_seconds
            pieces.append(Piece(self._now, seconds, count, event.batch, *spent))
        self.pace.add(msgspec.structs.replace(event, seconds=seconds))
        self._now += seconds
        self._examples, self._done = event.examples, event.step + 1
        self.bytes_sent += event.bytes_sent
        self._place_early()


def read_trial(folder: Path, label: str, seed: int = 0, error: str | None = None) -> Trial:
    """Read what a training has recorded into a folder; ``error`` is how it ended, if not well.

    Under Gossip the folder holds one for each worker. Without a record, or with a damaged one, the trial has failed.
    """
    alone = folder / "events.jsonl"
    files = [alone] if alone.exists() else sorted(folder.glob("worker-*/events.jsonl"), key=_rank)
    try:
        read = [_Reader().read(record.read(file)) for file in files]
    except PacelineError as damage:
        return Trial(label, seed, error=error or str(damage))
    if not any(each.workers for each in read):
        missing = f"no step was recorded in {folder}; give the script's Run that folder: Run(…, record=folder)"
        return Trial(label, seed, error=error or missing)
    first = read[0]
    if wrong := [point.accuracy for point in first.points if not 0 <= point.accuracy <= 1]:
        outside = f"an accuracy of {wrong[0]:g} was recorded; it must be a share from 0 to 1, not in percent"
        return Trial(label, seed, error=error or outside)
    known = first.pace.efficiency
    return Trial(
        label=label,
        seed=seed,
        points=tuple(first.points),
        workers=tuple(tuple(pieces) for each in read for pieces in each.workers),
        bytes_sent=first.bytes_sent,
        efficiency=None if math.isnan(known) else known,
        error=error,
    )


def _rank(file: Path) -> int:
    digits = file.parent.name.removeprefix("worker-")
    return int(digits) if digits.isdigit() else 0
