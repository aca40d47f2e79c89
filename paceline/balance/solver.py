"""Shares that let all workers finish together: pure functions."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from paceline.errors import SettingError

__all__ = ["Speed", "equal_finish", "finish", "longest_wait", "makespan", "reach"]


class Speed(NamedTuple):
    """How long a worker takes for n examples: ``fixed + per_example * n`` seconds; nothing for none."""

    fixed: float
    per_example: float


def finish(speed: Speed, examples: float) -> float:
    """Seconds that so many examples take."""
    return speed.fixed + speed.per_example * examples if examples else 0.0


def makespan(speeds: Sequence[Speed], shares: Sequence[float]) -> float:
    """Seconds until the last worker has finished."""
    return max(finish(speed, share) for speed, share in zip(speeds, shares, strict=True))


def longest_wait(speeds: Sequence[Speed], shares: Sequence[float]) -> float:
    """The part of the step that whoever finishes first waits for the last; who has nothing to do does not count."""
    times = [finish(speed, share) for speed, share in zip(speeds, shares, strict=True) if share]
    return 1 - min(times) / max(times) if times else 0.0


def reach(shares: Sequence[int], change: float, multiple: int, batch: int) -> tuple[list[int], list[int]]:
    """The smallest and the largest share of each worker that a change by this factor allows.

    One piece may always go or come, even if that is more than the factor allows.
    """
    fewer = [min(math.ceil(old / change / multiple) * multiple, old - multiple) for old in shares]
    more = [max(int(min(max(old, 1) * change, batch)), old + multiple) for old in shares]
    return fewer, more


def equal_finish(
    total: int,
    speeds: Sequence[Speed],
    least: Sequence[int] | None = None,
    most: Sequence[int] | None = None,
    multiple: int = 1,
) -> list[int]:
    """Whole shares of ``total`` with which the last worker finishes as early as can be.

    In real numbers and without bounds all finish at T = (B + sum_i a_i / c_i) / sum_i 1 / c_i, worker i with
    b_i = (T - a_i) / c_i examples. Rounded down, these are no more than what the best whole shares are; the few that
    are left go one after the other to whoever finishes earliest with one more, which is optimal since finish times grow
    with every example. Equal workers get equal shares, lower ranks the remainder.

    ``least`` and ``most`` bound each worker's share. With a ``multiple``, shares are whole multiples above ``least``;
    what is then left of ``total`` is one smaller piece.
    """
    lower = [0] * len(speeds) if least is None else list(least)
    upper = [total] * len(speeds) if most is None else [min(cap, total) for cap in most]
    _check(total, speeds, lower, upper, multiple)
    real = _level(total, speeds, lower, upper)
    # What is exact up to rounding must not lose a whole piece to it.
    shares = [low + int((share - low) / multiple + 1e-9) * multiple for share, low in zip(real, lower, strict=True)]
    left = total - sum(shares)
    left -= _give(left // multiple, multiple, speeds, shares, upper)
    left -= _give(1, left, speeds, shares, upper) if left else 0
    _give(left, 1, speeds, shares, upper)  # where nobody has room for a whole piece
    return shares


def _level(total: int, speeds: Sequence[Speed], lower: Sequence[int], upper: Sequence[int]) -> list[float]:
    """Real shares that sum to ``total``: everybody works until the same time T, within the bounds."""
    events = sorted(
        event
        for (fixed, each), low, high in zip(speeds, lower, upper, strict=True)
        for event in ((fixed + each * low, 1 / each), (fixed + each * high, -1 / each))
        if high > low
    )
    given, rate, at = float(sum(lower)), 0.0, 0.0
    for time, change in events:
        if given + rate * (time - at) >= total:
            break
        given += rate * (time - at)
        rate, at = rate + change, time
    time = at + (total - given) / rate if rate > 0 else at
    return [
        min(max((time - fixed) / each, low), high)
        for (fixed, each), low, high in zip(speeds, lower, upper, strict=True)
    ]


def _give(pieces: int, piece: int, speeds: Sequence[Speed], shares: list[int], upper: Sequence[int]) -> int:
    """Give pieces out, each to who finishes earliest with it and has room; how many examples were given."""
    queue = [
        (finish(speeds[rank], share + piece), rank) for rank, share in enumerate(shares) if share + piece <= upper[rank]
    ]
    heapq.heapify(queue)
    given = 0
    while queue and given < pieces:
        rank = queue[0][1]
        shares[rank] += piece
        given += 1
        if shares[rank] + piece <= upper[rank]:
            heapq.heapreplace(queue, (finish(speeds[rank], shares[rank] + piece), rank))
        else:
            heapq.heappop(queue)
    return given * piece


def _check(total: int, speeds: Sequence[Speed], lower: Sequence[int], upper: Sequence[int], multiple: int) -> None:
    if any(speed.per_example <= 0 or speed.fixed < 0 for speed in speeds):
        raise SettingError(f"no worker takes no time for an example; the speeds are {list(speeds)}")
    if multiple < 1:
        raise SettingError(f"shares cannot be multiples of {multiple}; it must be at least 1")
    if sum(lower) > total or any(low > high for low, high in zip(lower, upper, strict=True)):
        raise SettingError(f"{total} examples are too few for shares of at least {list(lower)}; lower least")
    if sum(upper) < total:
        raise SettingError(
            f"{total} examples are more than all workers can take together ({list(upper)}); lower the batch, or raise "
            "most"
        )
