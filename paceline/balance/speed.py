"""How fast each worker is, from what it was seen to do."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from paceline.balance.solver import Speed

__all__ = ["SpeedModel", "typical"]

OUTLIER = 2.0  # times the median seconds for an example, up or down
DIFFERENT = 0.05  # sizes that differ by less say nothing about what an example takes
NEWEST = 0.5  # what the newest pair of sizes counts in the share of fixed time
MOST_FIXED = 0.9  # of a step: with more, no share would help


def typical(samples: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Mean examples and seconds of a few steps, those left out that are far from the others; None if there are none."""
    used = [(examples, seconds) for examples, seconds in samples if examples > 0 and seconds > 0]
    if not used:
        return None
    # Of two the lower: the other one may be what is unusual.
    usual = statistics.median_low(seconds / examples for examples, seconds in used)
    near = [one for one in used if usual / OUTLIER <= one[1] / one[0] <= usual * OUTLIER]
    return statistics.fmean(one[0] for one in near), statistics.fmean(one[1] for one in near)


class SpeedModel:
    """Seconds of a step of n examples: a + c n.

    The line goes through what was seen last, so that a worker whose speed changes is known at once. Which part of it is
    fixed, f = a / (a + c n), comes from pairs of neighbouring plans with different sizes, as a moving average; until
    there was one, none is: time is then proportional to examples.
    """

    def __init__(self, affine: bool = True) -> None:
        self._affine = affine
        self._last: tuple[float, float] | None = None
        self._fixed: float | None = None

    @property
    def speed(self) -> Speed | None:
        """The present one; None before anything was seen."""
        if self._last is None:
            return None
        examples, seconds = self._last
        fixed = (self._fixed or 0.0) * seconds
        return Speed(fixed, (seconds - fixed) / examples)

    def add(self, examples: float, seconds: float) -> None:
        """Learn from the steps of one plan."""
        if self._last is not None and self._affine:
            before, took = self._last
            if abs(examples - before) > DIFFERENT * before:
                each = (seconds - took) / (examples - before)
                part = min(max(1.0 - each * examples / seconds, 0.0), MOST_FIXED)
                self._fixed = part if self._fixed is None else self._fixed + NEWEST * (part - self._fixed)
        self._last = examples, seconds

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"last": self._last, "fixed": self._fixed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._last = None if state["last"] is None else tuple(state["last"])
        self._fixed = state["fixed"]
