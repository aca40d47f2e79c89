"""Workers that cost more time than they save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.balance.bounds import Bounds
from paceline.balance.solver import Speed, finish, makespan

__all__ = ["burdens", "told"]


def burdens(batch: int, speeds: Sequence[Speed], bounds: Bounds) -> set[int]:
    """Who makes the step longer with its smallest share than it would be without it.

    Where smallest shares are 0, the solver leaves out by itself whoever is too slow for a single piece.
    """
    found: set[int] = set()
    floors = bounds.floors(batch)
    while True:
        left = _without(found, bounds)
        shares = left.best(batch, speeds)
        times = [finish(speed, share) for speed, share in zip(speeds, shares, strict=True)]
        longest = max(times)
        if not any(floors):
            alone = [finish(speed, bounds.multiple) for speed in speeds]
            found |= {rank for rank, cap in enumerate(left.caps) if cap and not shares[rank] and alone[rank] > longest}
        slowest = {rank for rank, seconds in enumerate(times) if seconds == longest}
        rest = _without(found | slowest, bounds)
        if any(shares[rank] > floors[rank] for rank in slowest) or sum(rest.caps) < batch:
            return found
        if makespan(speeds, rest.best(batch, speeds)) >= longest:
            return found
        found |= slowest


def told(rank: int, speed: Speed, examples: int, idle: bool) -> str:
    """What the record says of one, who gets nothing to do if ``idle``."""
    what = "it gets nothing to do" if idle else "BySpeed(leave_out=True) would give it nothing to do"
    share = f"{examples} example{'s' if examples != 1 else ''}"
    return (
        f"worker {rank} is so slow ({finish(speed, examples):.3g} s for a step of {share}) that the others would be "
        f"done sooner without it; {what}"
    )


def _without(ranks: set[int], bounds: Bounds) -> Bounds:
    return replace(bounds, caps=tuple(0 if rank in ranks else cap for rank, cap in enumerate(bounds.caps)), out=())
