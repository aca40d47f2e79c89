"""Workers that cost more time than they save."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.balance.solver import Speed, finish, makespan

__all__ = ["burdens", "told"]


def burdens(
    batch: int,
    speeds: Sequence[Speed],
    floors: Sequence[int],
    caps: Sequence[int],
    multiple: int,
    solve: Callable[[Sequence[int]], Sequence[int]],
) -> set[int]:
    """Who makes the step longer with its smallest share than it would be without it.

    ``solve`` gives the best shares of the batch within other caps. Where smallest shares are 0, it leaves out by itself
    whoever is too slow for a single piece (``multiple``).
    """
    found: set[int] = set()
    while True:
        left = _without(caps, found)
        shares = solve(left)
        times = [finish(speed, share) for speed, share in zip(speeds, shares, strict=True)]
        longest = max(times)
        if not any(floors):
            alone = [finish(speed, multiple) for speed in speeds]
            found |= {rank for rank, cap in enumerate(left) if cap and not shares[rank] and alone[rank] > longest}
        slowest = {rank for rank, seconds in enumerate(times) if seconds == longest}
        rest = _without(caps, found | slowest)
        if any(shares[rank] > floors[rank] for rank in slowest) or sum(rest) < batch:
            return found
        if makespan(speeds, solve(rest)) >= longest:
            return found
        found |= slowest


def told(rank: int, speed: Speed, examples: int, idle: bool) -> str:
    """What the record says of one, who gets nothing to do if ``idle``."""
    what = "it gets nothing to do" if idle else "leave_out=True would give it nothing to do"
    return (
        f"worker {rank} is so slow ({finish(speed, examples):.3g} s for {examples} examples) that the others would be "
        f"done sooner without it; {what}"
    )


def _without(caps: Sequence[int], ranks: set[int]) -> list[int]:
    return [0 if rank in ranks else cap for rank, cap in enumerate(caps)]
