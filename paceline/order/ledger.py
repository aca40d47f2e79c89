"""The gradients of an epoch's units, put together from what all workers have seen, in the order of the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import LoopError
from paceline.order.fragments import Fragment
from paceline.order.signs import grid_of

__all__ = ["Ledger"]

# Steps of the grid: gradients that have grown by more than 64 since the epoch's first step are cut off, so that sums of
# products of hundreds of numbers stay exact.
LARGEST = 2.0**20


class Ledger:
    """Collects fragments until units are whole, and gives them out one after the other, stream by stream.

    Rows are rounded to a grid that an epoch's first step decides, a power of two, unless ``exact``.

    Args:
        counts: how many units each stream has.
        unit: examples of a unit.
        exact: give rows as they came.
    """

    def __init__(self, counts: Sequence[int], unit: int, exact: bool) -> None:
        self._counts, self._unit, self._exact = list(counts), unit, exact
        self._fragments: dict[tuple[int, int], list[Fragment]] = {}
        self._given = [0] * len(counts)
        self._grid = 0.0
        self._sums: list[Tensor | None] = [None] * len(counts)
        self._seen = [0] * len(counts)

    def begin(self, fragments: Sequence[Fragment]) -> None:
        """See all that was exchanged at once, before it is added: the first time in an epoch the grid follows it."""
        # What was not finite, or is zero, says nothing about how large gradients are.
        seen = [(each.step, float(each.image.abs().max())) for each in fragments if each.weight]
        first = min((step for step, largest in seen if largest), default=None)
        if not self._grid and first is not None:
            self._grid = grid_of(max(largest for step, largest in seen if step == first))

    def add(self, stream: int, index: int, fragment: Fragment) -> None:
        """Take a part of a unit, which is number ``index`` of its stream."""
        self._fragments.setdefault((stream, index), []).append(fragment)

    def take(self, stream: int) -> Tensor | None:
        """The rows that follow in a stream, as far as their units are whole.

        One that has come without any weight counts as the mean of those before it in its stream, which does not depend
        on when workers tell each other; as zero if it is the first.
        """
        rows: list[Tensor] = []
        while (parts := self._next(stream)) and sum(part.examples for part in parts) == self._unit:
            row = self._row(stream, parts)
            if row is None:
                row = self._mean([stream])
            rows.append(torch.zeros_like(parts[0].image, dtype=torch.float64) if row is None else row)
            self._move_on(stream)
        return torch.stack(rows) if rows else None

    def rest(self) -> list[Tensor | None]:
        """The epoch is over: the rows that are left of each stream.

        A unit of which only a part was seen counts as that part; one that nobody saw (a worker has left the loop), as
        the mean of all others.
        """
        found: list[list[Tensor | None]] = []
        for stream, count in enumerate(self._counts):
            found.append([])
            while self._given[stream] < count:
                found[-1].append(self._row(stream, self._next(stream)))
                self._move_on(stream)
        mean = self._mean(range(len(self._counts)))
        if mean is None:
            raise LoopError(
                "an epoch has ended without any gradient that an order could learn from: every weight given to "
                "step.backward was zero, or no gradient was finite; use order.Shuffle, or look at the loss"
            )
        return [torch.stack([mean if row is None else row for row in rows]) if rows else None for rows in found]

    def _next(self, stream: int) -> list[Fragment]:
        return self._fragments.get((stream, self._given[stream]), [])

    def _move_on(self, stream: int) -> None:
        self._fragments.pop((stream, self._given[stream]), None)
        self._given[stream] += 1

    def _row(self, stream: int, parts: list[Fragment]) -> Tensor | None:
        weight = sum(part.weight for part in parts)
        if not weight:
            return None
        total = torch.zeros_like(next(part.image for part in parts if part.weight))
        for part in sorted(parts, key=lambda each: each.start):  # not as they came: that may be another order next time
            if part.weight:
                total += part.weight * part.image
        row = self._rounded(total / weight)
        before = self._sums[stream]
        self._sums[stream] = row.clone() if before is None else before + row
        self._seen[stream] += 1
        return row

    def _mean(self, streams: Sequence[int]) -> Tensor | None:
        """Of the rows that were seen so far of some streams; None if there are none."""
        sums = [total for at in streams if (total := self._sums[at]) is not None]
        return self._rounded(torch.stack(sums).sum(0) / sum(self._seen[at] for at in streams)) if sums else None

    def _rounded(self, row: Tensor) -> Tensor:
        if self._exact or not self._grid:  # without a grid all that was seen is zero
            return row
        return torch.round(row / self._grid).clamp(-LARGEST, LARGEST) * self._grid

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, in the middle of an epoch, too."""
        parts = [[*place, *fragment] for place, found in self._fragments.items() for fragment in found]
        return {
            "fragments": parts,
            "given": self._given,
            "grid": self._grid,
            "sums": self._sums,
            "seen": self._seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._fragments = {}
        for stream, index, *fragment in state["fragments"]:
            self.add(stream, index, Fragment(*fragment))
        self._given, self._grid = list(state["given"]), state["grid"]
        self._sums, self._seen = list(state["sums"]), list(state["seen"])
