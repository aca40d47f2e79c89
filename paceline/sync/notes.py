"""Notes as numbers that ride in a sum."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.records import Note

__all__ = ["NotesTable", "join_halves", "split_halves"]

FIELDS = len(msgspec.structs.fields(Note))
Numbers = NDArray[np.float64]


def split_halves(values: Numbers) -> Numbers:
    """Doubles as pairs of numbers that float32 holds: 48 bits, so counts and check sums stay exact."""
    with np.errstate(over="ignore", invalid="ignore"):
        high = values.astype(np.float32).astype(np.float64)
        low: Numbers = np.where(np.isfinite(high), values - high, 0.0)
    return np.stack([high, low])


def join_halves(halves: Numbers) -> Numbers:
    """The doubles back."""
    doubles: Numbers = halves[0] + halves[1]
    return doubles


class NotesTable:
    """The notes of all workers: each writes its own row into a table of zeros, and the sum is the whole table."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.own = Note()
        """This worker's note: set it before the exchange."""
        self.all: tuple[Note, ...] = ()
        """Everybody's, after the exchange."""

    @property
    def numel(self) -> int:
        """Two numbers for each field of each worker."""
        return 2 * self._size * FIELDS

    def write(self, out: Numbers) -> None:
        """Fill in this worker's row."""
        out.fill(0.0)
        out.reshape(2, self._size, FIELDS)[:, self._rank] = split_halves(np.array(msgspec.structs.astuple(self.own)))

    def read(self, summed: Numbers) -> None:
        """Take the table apart."""
        rows = join_halves(summed.reshape(2, self._size, FIELDS)).tolist()
        self.all = tuple(Note(*row) for row in rows)
