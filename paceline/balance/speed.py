"""How fast each worker is, from what it was seen to do."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.balance.solver import Speed

__all__ = ["SpeedModel", "Typical", "typical"]

OUTLIER = 2.0  # times the median seconds for an example, up or down
DIFFERENT = 0.05  # sizes that differ by less say nothing about what an example takes
NEWEST = 0.5  # what the newest pair of sizes counts in what the fixed part is worth
MOST_WORTH = 31.0  # usual shares that the fixed part of a step may be worth: with more, no share would help


class Typical(NamedTuple):
    """What a few steps of a worker were like."""

    examples: float
    seconds: float
    error: float
    """Standard error of the seconds, as a part of them; 0 with a single step, of which nothing is known."""


def typical(samples: Sequence[tuple[float, float]]) -> Typical | None:
    """The mean of a few steps, those left out that are far from the others; None if there are none."""
    used = [(examples, seconds) for examples, seconds in samples if examples > 0 and seconds > 0]
    if not used:
        return None
    # Of two the lower: the other one may be what is unusual.
    usual = statistics.median_low(seconds / examples for examples, seconds in used)
    near = [one for one in used if usual / OUTLIER <= one[1] / one[0] <= usual * OUTLIER]
    each = [seconds / examples for examples, seconds in near]
    error = statistics.stdev(each) / statistics.fmean(each) / len(each) ** 0.5 if len(each) > 1 else 0.0
    return Typical(statistics.fmean(one[0] for one in near), statistics.fmean(one[1] for one in near), error)


class SpeedModel:
    """Seconds of a step of n examples: a + c n.

    The line goes through what was seen last, so that a worker whose speed changes is known at once. What the fixed part
    is worth, r = a / c examples, comes from pairs of neighbouring plans with different sizes, as a moving average;
    until there was one, nothing: time is then proportional to examples. A worker that slows down keeps its r.
    """

    def __init__(self, affine: bool = True) -> None:
        self._affine = affine
        self._last: tuple[float, float] | None = None
        self._worth: float | None = None

    @property
    def speed(self) -> Speed | None:
        """The present one; None before anything was seen."""
        if self._last is None:
            return None
        examples, seconds = self._last
        worth = self._worth or 0.0
        each = seconds / (worth + examples)
        return Speed(worth * each, each)

    def add(self, examples: float, seconds: float, usual: float) -> None:
        """Learn from the steps of one plan; ``usual`` is what an average worker has to do."""
        if self._last is not None and self._affine:
            before, took = self._last
            if abs(examples - before) > DIFFERENT * before:
                each = (seconds - took) / (examples - before)
                most = MOST_WORTH * usual
                worth = min(max(seconds / each - examples, 0.0), most) if each > 0 else most
                self._worth = worth if self._worth is None else self._worth + NEWEST * (worth - self._worth)
        self._last = examples, seconds

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"last": self._last, "worth": self._worth}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._last = None if state["last"] is None else tuple(state["last"])
        self._worth = state["worth"]
