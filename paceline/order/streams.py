"""In which sequences the units of a learnt order are: one for all workers, or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["OneStream", "WorkerStreams", "deal", "line_up"]


@dataclass(frozen=True)
class OneStream:
    """All units are one sequence, whoever computes them: for data that all workers can read."""


@dataclass(frozen=True)
class WorkerStreams:
    """A sequence of units for each worker.

    Args:
        shared_sum: one running sum for all (CD-GraB); otherwise each stream has its own (ID-GraB, for comparison).
    """

    shared_sum: bool = True


def deal(units: list[int], streams: int) -> list[list[int]]:
    """Units, one after the other to each stream."""
    return [units[stream::streams] for stream in range(streams)]


def line_up(orders: Sequence[Sequence[int]]) -> list[int]:
    """The opposite: the units of all streams, the first of each, then the second of each."""
    streams, count = len(orders), sum(map(len, orders))
    return [orders[at % streams][at // streams] for at in range(count)]
