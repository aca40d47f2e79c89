"""From a cursor to the next plan: pure functions, the same on every worker and for looking ahead.

With shared data there is one order and one position in it; a step takes the next examples and cuts them by the
workers' shares, so the examples of a step do not depend on who computes them. With local data each worker has
its own data set, order and position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec

from paceline.balance.rounding import largest_remainder
from paceline.errors import SettingError
from paceline.ranges import Ranges, drop, simplified
from paceline.records import Plan, Progress

__all__ = ["Cursor", "Split", "advance", "after", "checked_shares", "cut", "remaining", "take_local"]

Split = Callable[[int, int], Sequence[int]]
"""``(batch, workers) -> shares``: the balance role."""


class Cursor(msgspec.Struct, frozen=True):
    """Where the run stands in its data."""

    progress: Progress
    taken: tuple[int, ...]
    """Examples of this epoch that were used: one number for shared data, one for each worker for local data."""
    ranges: Ranges = ()
    """What is left of the epoch's order, where that is not simply the end of it; shared data only."""
    pace: tuple[int, ...] = ()
    """What each worker drew in the last round, if that was one in which each went at its own pace."""


def cut(
    cursor: Cursor,
    lengths: tuple[int, ...],
    workers: int,
    batch: int,
    split: Split,
    micro: int | None,
    left: int | None,
) -> Plan:
    """The plan of the next step.

    ``lengths`` is ``(N,)`` for shared data and each worker's length for local data. ``left`` bounds the examples
    (a budget). The last step of an epoch takes what remains; a share may then be zero.
    """
    rest = remaining(cursor, lengths)
    size = min(batch, sum(rest), batch if left is None else left)
    shares = checked_shares(batch, size, workers, split)
    if len(lengths) == 1 and len(cursor.taken) == 1:
        counts = tuple(shares)
        starts = tuple(accumulate(counts[:-1], initial=0 if cursor.ranges else cursor.taken[0]))
    else:
        counts = take_local(shares, rest)
        starts = cursor.taken
    return Plan(
        step=cursor.progress.step,
        epoch=cursor.progress.epoch,
        starts=starts,
        counts=counts,
        micro=micro or max(max(counts), 1),
        ranges=cursor.ranges,
    )


def checked_shares(batch: int, size: int, workers: int, split: Split) -> Sequence[int]:
    """What the balance makes of the ``size`` examples that there are for a batch, which must be large enough."""
    if batch < workers:
        raise SettingError(
            f"batch ({batch}) is below the number of workers ({workers}), so some would have nothing to do; "
            "raise the batch or start fewer workers"
        )
    shares = split(size, workers)
    if len(shares) != workers or sum(shares) != size or min(shares) < 0:
        raise SettingError(
            f"the balance split {size} examples between {workers} workers into {list(shares)}; it must give each "
            f"worker a whole number of at least 0, and {size} in all"
        )
    return shares


def remaining(cursor: Cursor, lengths: tuple[int, ...]) -> list[int]:
    """Examples of the epoch that are left: of shared data, or of each worker's own."""
    return [length - taken for length, taken in zip(lengths, cursor.taken, strict=True)]


def take_local(shares: Sequence[int], remaining: Sequence[int]) -> tuple[int, ...]:
    """What each worker takes of its own data: its share, and of what others lack a part in proportion to it.

    Whoever has no share takes some only when nobody who has one has data left. There must be enough for all shares.
    """
    counts = [min(share, has) for share, has in zip(shares, remaining, strict=True)]
    while lacking := sum(shares) - sum(counts):
        room = [has - count for has, count in zip(remaining, counts, strict=True)]
        weights = [share if free else 0 for share, free in zip(shares, room, strict=True)]
        more = largest_remainder(lacking, weights if any(weights) else [free > 0 for free in room])
        counts = [count + min(part, free) for count, part, free in zip(counts, more, room, strict=True)]
    return tuple(counts)


def advance(cursor: Cursor, plan: Plan, lengths: tuple[int, ...]) -> Cursor:
    """Where the run stands after a step."""
    shared = len(cursor.taken) == 1 and len(lengths) == 1
    used = (plan.batch,) if shared else plan.counts
    taken = tuple(before + more for before, more in zip(cursor.taken, used, strict=True))
    ranges = simplified(drop(cursor.ranges, plan.batch), lengths[0]) if cursor.ranges else ()
    return after(cursor, 1, plan.batch, taken, ranges, lengths, ())


def after(
    cursor: Cursor,
    steps: int,
    examples: int,
    taken: tuple[int, ...],
    ranges: Ranges,
    lengths: tuple[int, ...],
    pace: tuple[int, ...],
) -> Cursor:
    """The cursor after so many steps and examples; when all is taken, the next epoch begins."""
    done = taken == lengths
    progress = Progress(
        step=cursor.progress.step + steps,
        epoch=cursor.progress.epoch + done,
        examples=cursor.progress.examples + examples,
    )
    return Cursor(progress, (0,) * len(taken) if done else taken, () if done else ranges, pace)
