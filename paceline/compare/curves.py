"""What changes in the course of a training: the batch, and for each worker its share and its waiting."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.compare.trial import Piece, Trial

__all__ = ["Curves", "curves", "first_steps"]

BINS = 40  # points of a line at most
Points = list[tuple[float, float]]


class Curves(NamedTuple):
    """Over seconds; shares and waiting by rank."""

    batch: Points
    shares: list[Points]
    """Of the examples of all workers."""
    waiting: list[Points]
    """Of the worker's own time."""


def curves(trial: Trial) -> Curves:
    """Values for equal parts of the time, so many that every worker has a few steps in each.

    The batch is the median, since the last one of an epoch is often small.
    """
    fewest = min((len(pieces) for pieces in trial.workers), default=0)
    count = max(1, min(BINS, fewest // 3))
    wide = trial.seconds / count or 1.0
    parts = [_cut(pieces, wide, count) for pieces in trial.workers]
    whole = [sum(_examples(part[at]) for part in parts) for at in range(count)]
    middle = [(at + 0.5) * wide for at in range(count)]

    def points(part: list[list[Piece]], value: Callable[[int, list[Piece]], float]) -> Points:
        return [(middle[at], value(at, inside)) for at, inside in enumerate(part) if inside and whole[at]]

    return Curves(
        batch=points(parts[0], lambda at, inside: statistics.median(piece.batch for piece in inside)) if parts else [],
        shares=[points(part, lambda at, inside: _examples(inside) / whole[at]) for part in parts],
        waiting=[points(part, lambda at, inside: _ratio(inside)) for part in parts],
    )


def first_steps(trial: Trial, count: int = 6) -> list[tuple[str, Sequence[Piece]]]:
    """Each worker's steps or rounds until rank 0 has done so many."""
    if not trial.workers:
        return []
    last = trial.workers[0][:count][-1]
    end = last.begin + last.seconds
    return [(f"w{rank}", [piece for piece in pieces if piece.begin < end]) for rank, pieces in enumerate(trial.workers)]


def _cut(pieces: Sequence[Piece], wide: float, count: int) -> list[list[Piece]]:
    found: list[list[Piece]] = [[] for _ in range(count)]
    for piece in pieces:
        found[min(count - 1, int((piece.begin + piece.seconds / 2) / wide))].append(piece)
    return found


def _examples(pieces: Sequence[Piece]) -> int:
    return sum(piece.examples for piece in pieces)


def _ratio(pieces: Sequence[Piece]) -> float:
    seconds = sum(piece.seconds for piece in pieces)
    return min(1.0, sum(piece.wait for piece in pieces) / seconds) if seconds else 0.0
