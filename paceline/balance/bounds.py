"""What shares may be: bounds, whole pieces, and who gets nothing. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.balance.solver import Speed, equal_finish, finish, reach
from paceline.errors import SettingError

__all__ = ["Bounds", "caps_of", "spare"]


@dataclass(frozen=True)
class Bounds:
    """Of the shares of a batch."""

    least: int
    """The smallest share of a worker."""
    caps: tuple[int, ...]
    """For each worker, the largest."""
    multiple: int = 1
    """Shares are multiples of it, but for one worker's."""
    out: tuple[int, ...] = ()
    """Who gets nothing, unless the others have no room for the rest."""

    def floors(self, batch: int) -> list[int]:
        """For each worker, the smallest share in whole pieces, as far as the batch has so many examples."""
        whole = math.ceil(self.least / self.multiple) * self.multiple
        if self.least <= batch:
            whole = min(whole, batch)
        return [min(whole, cap) for cap in self.caps]

    def best(self, batch: int, speeds: Sequence[Speed]) -> list[int]:
        """The shares with which all finish together."""
        lower, upper = _without(self.out, self.floors(batch)), _without(self.out, self.caps)
        if sum(upper) < batch:
            lower, upper = self.floors(batch), list(self.caps)
        if sum(lower) > batch:
            # Shares are whole, so that a smallest one of 1 needs nothing; and one of more than there is, is none.
            fits = 1 < self.least <= batch
            lower, upper = spare(batch, speeds, lower, upper) if fits else ([0] * len(upper), upper)
        return equal_finish(batch, speeds, lower, upper, self.multiple)

    def near(self, batch: int, speeds: Sequence[Speed], present: Sequence[int], change: float) -> list[int]:
        """The best of those that are not too far from the present ones."""
        fewer, more = reach(present, change, self.multiple, batch)
        upper = _without(self.out, [min(cap, high) for cap, high in zip(self.caps, more, strict=True)])
        floors = self.floors(batch)
        lower = [min(max(floor, low, 0), high) for floor, low, high in zip(floors, fewer, upper, strict=True)]
        if not sum(lower) <= batch <= sum(upper):  # then some must change by more than they may
            return self.best(batch, speeds)
        return equal_finish(batch, speeds, lower, upper, self.multiple)


def spare(
    total: int, speeds: Sequence[Speed], least: Sequence[int], most: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Bounds that fit where there is too little for everybody's smallest share: the slowest get nothing.

    They are those that take longest for their smallest share, of equal ones the higher ranks, and as few as will do.
    Where there is too little for anybody's, or the others have no room for the rest, there is no smallest share.
    """
    lower, upper = list(least), list(most)
    some = [rank for rank, share in enumerate(least) if share]
    for rank in sorted(some, key=lambda rank: (finish(speeds[rank], least[rank]), rank), reverse=True):
        if sum(lower) <= total:
            break
        lower[rank] = upper[rank] = 0
    return (lower, upper) if any(lower) and sum(upper) >= total else ([0] * len(lower), list(most))


def caps_of(
    batch: int, workers: int, most: int | Sequence[int] | None, learnt: Sequence[int], multiple: int
) -> tuple[int, ...]:
    """The largest share of each worker: what the user allows, and what memory was found to hold (0 if not known)."""
    caps = list(most) if isinstance(most, Sequence) else [batch if most is None else most] * workers
    if len(caps) != workers:
        raise SettingError(f"BySpeed: most has {len(caps)} numbers for {workers} workers; give one for each")
    if len(learnt) == workers:
        fitting = [min(cap, limit) if limit else cap for cap, limit in zip(caps, learnt, strict=True)]
        # If that leaves some examples to nobody, who is short of memory takes its share in several pieces.
        caps = fitting if sum(fitting) >= batch else caps
    whole = [cap if cap >= batch or cap < multiple else cap // multiple * multiple for cap in caps]
    return tuple(whole if sum(whole) >= batch else caps)


def _without(out: Sequence[int], values: Sequence[int]) -> list[int]:
    return [0 if rank in out else value for rank, value in enumerate(values)]
