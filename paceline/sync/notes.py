"""Notes as numbers that ride in a sum."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.records import Note

__all__ = ["NotesTable", "Numbers", "split_halves"]

FIELDS = len(msgspec.structs.fields(Note))
Numbers = NDArray[Any]
"""A vector of float32 or float64."""


def split_halves(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Doubles as pairs of numbers that float32 holds: 48 bits, so counts and check sums stay exact."""
    layout = f"{len(values)}f"
    try:
        high = list(struct.unpack(layout, struct.pack(layout, *values)))
    except OverflowError:  # beyond what float32 holds: infinite
        high = [float(np.float32(value)) if abs(value) < 3e38 else math.copysign(math.inf, value) for value in values]
    return high, [value - part if math.isfinite(part) else 0.0 for value, part in zip(values, high, strict=True)]


class NotesTable:
    """The notes of all workers: each writes its own row into a table of zeros, and the sum is the whole table."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.own = Note()
        """This worker's note: set it before the exchange."""
        self.all: tuple[Note, ...] = ()
        """Everybody's, after the exchange."""
        self.numel = 2 * size * FIELDS
        """Two numbers for each field of each worker."""

    def write(self, out: Numbers) -> None:
        """Fill in this worker's row."""
        out.fill(0.0)
        out.reshape(2, self._size, FIELDS)[:, self._rank] = split_halves(msgspec.structs.astuple(self.own))

    def read(self, summed: Numbers) -> None:
        """Take the table apart."""
        rows = summed.reshape(2, self._size, FIELDS).sum(0, dtype=np.float64).tolist()
        self.all = tuple(Note(*row) for row in rows)
