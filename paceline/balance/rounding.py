"""Whole numbers that keep a sum."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["largest_remainder"]


def largest_remainder(total: int, weights: Sequence[float]) -> list[int]:
    """Cut ``total`` into whole parts in proportion to the weights, which are at least 0 and not all 0.

    Every part is the exact one rounded down, or one more: the largest remainders get it, lower places first.
    """
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda at: (parts[at] - exact[at], at))
    for at in by_remainder[: total - sum(parts)]:
        parts[at] += 1
    return parts
