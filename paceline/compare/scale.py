"""The geometry of charts: from values to pixels, and places for numbers and names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Axis", "axis_over", "nice", "spread"]

TINY = 1e-9


def nice(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20 … (and their tenths) that is not below this."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def spread(wanted: Sequence[float], apart: float, bottom: float) -> list[float]:
    """Places for names near the wanted ones, in the same order, that do not lie on each other or below the bottom."""
    order = sorted(range(len(wanted)), key=lambda at: wanted[at])
    found = [0.0] * len(wanted)
    lowest = -math.inf
    for at in order:
        found[at] = lowest = max(wanted[at], lowest + apart)
    highest = bottom
    for at in reversed(order):
        found[at] = min(found[at], highest)
        highest = found[at] - apart
    return found


class Axis(NamedTuple):
    """Values from ``low`` to ``high`` on pixels from ``begin`` to ``end``, with a number at every ``step``."""

    low: float
    high: float
    step: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a value; one beyond the axis lies at its end."""
        inside = min(max(value, self.low), self.high)
        return self.begin + (inside - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """The values that have a number."""
        first = math.ceil(self.low / self.step - 1e-9)
        return [number * self.step for number in range(first, math.floor(self.high / self.step + 1e-9) + 1)]


def axis_over(
    low: float, high: float, begin: float, end: float, *, whole: bool = False, most: float = math.inf, ticks: int = 5
) -> Axis:
    """An axis from ``low`` to ``high``; ``whole`` makes it begin and end at a number, but not beyond ``most``."""
    # Values that differ by rounding alone are one value.
    if high - low <= max(TINY, TINY * abs(low), TINY * abs(high)):
        low, high = (low - 1.0, low) if low + 1.0 > most else (low, low + 1.0)
    step = nice((high - low) / ticks)
    if whole:
        low, high = step * math.floor(low / step + 1e-9), min(most, step * math.ceil(high / step - 1e-9))
    return Axis(low, high, step, begin, end)
