"""Positions of an epoch as a list of ranges, one behind the other. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

__all__ = ["Ranges", "drop", "part", "simplified", "split_at_multiples"]

Ranges = tuple[tuple[int, int], ...]
"""``(start, stop)`` for each range."""


def part(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The positions from number ``start`` to number ``stop`` of all that are in the ranges."""
    found = []
    before = 0
    for first, last in ranges:
        low, high = max(start - before, 0), min(stop - before, last - first)
        if low < high:
            found.append((first + low, first + high))
        before += last - first
    return tuple(found)


def drop(ranges: Ranges, count: int) -> Ranges:
    """What follows the first ``count`` positions."""
    return part(ranges, count, sum(last - first for first, last in ranges))


def split_at_multiples(ranges: Ranges, unit: int) -> list[int]:
    """The lengths of what the ranges are cut into at every multiple of ``unit``."""
    found: list[int] = []
    for first, last in ranges:
        bounds = [first, *range(first // unit * unit + unit, last, unit), last]
        found += [stop - start for start, stop in pairwise(bounds)]
    return found


def simplified(ranges: Iterable[tuple[int, int]], length: int) -> Ranges:
    """Neighbours joined; nothing if it is one range that goes to the end of the epoch."""
    joined: list[tuple[int, int]] = []
    for first, last in ranges:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last)
        elif first < last:
            joined.append((first, last))
    return () if len(joined) == 1 and joined[0][1] == length else tuple(joined)
