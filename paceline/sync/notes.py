"""Notes as numbers that ride in a sum."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from paceline.records import Note

__all__ = ["NotesTable", "join_halves", "split_halves"]

FIELDS = len(msgspec.structs.fields(Note))


def split_halves(values: Tensor) -> Tensor:
    """Doubles as pairs of floats, high and low part: 48 bits, so counts and check sums stay exact in float32."""
    high = values.float()
    low = torch.where(torch.isfinite(high), values - high.double(), 0.0).float()
    return torch.stack([high, low])


def join_halves(halves: Tensor) -> Tensor:
    """The doubles back."""
    return halves[0].double() + halves[1].double()


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

    def write(self, out: Tensor) -> None:
        """Fill in this worker's row."""
        out.zero_()
        row = torch.tensor(msgspec.structs.astuple(self.own), dtype=torch.float64)
        out.view(2, self._size, FIELDS)[:, self._rank] = split_halves(row).to(out)

    def read(self, summed: Tensor) -> None:
        """Take the table apart."""
        rows: list[list[float]] = join_halves(summed.view(2, self._size, FIELDS).cpu()).tolist()
        self.all = tuple(Note(*row) for row in rows)
