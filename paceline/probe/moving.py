"""Moving averages of noisy statistics."""

from __future__ import annotations

import math
from typing import Any

from paceline.records import GradientStats

__all__ = ["Moments", "MovingAverage"]


class MovingAverage:
    """An exponential moving average that is not biased towards where it starts.

    With the smoothing t, every value counts t times as much as the next one; the weights are divided by their sum. The
    smoothing may be another one each time.
    """

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    @property
    def value(self) -> float:
        """The average; NaN before the first value."""
        return self._sum / self._weight if self._weight else math.nan

    def add(self, value: float, smoothing: float) -> None:
        """Take one more value."""
        self._sum = smoothing * self._sum + (1.0 - smoothing) * value
        self._weight = smoothing * self._weight + (1.0 - smoothing)

    def state_dict(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take that back."""
        self._sum, self._weight = state["sum"], state["weight"]


class Moments:
    """Averages over steps of what :class:`~paceline.records.GradientStats` estimates without bias.

    Variance and squared mean are averaged apart and divided afterwards: a mean of quotients would be far off. Neither
    depends on the batch of its step, so that a batch that changes does no harm. Zero is the least that is given.
    """

    def __init__(self) -> None:
        self._variance, self._signal, self._along = MovingAverage(), MovingAverage(), MovingAverage()

    @property
    def known(self) -> bool:
        """Whether there was anything to learn from."""
        return not math.isnan(self._variance.value)

    @property
    def variance(self) -> float:
        """Of one example's gradient, summed over coordinates."""
        return max(self._variance.value, 0.0)

    @property
    def signal(self) -> float:
        """The squared norm of the true gradient."""
        return max(self._signal.value, 0.0)

    @property
    def along(self) -> float:
        """Of the variance, what is along the mean gradient; zero where nobody asks for it."""
        return min(max(self._along.value, 0.0), self.variance) if not math.isnan(self._along.value) else 0.0

    def mean_sqnorm(self, weight: float) -> float:
        """The squared norm that the mean gradient of a batch of this weight has on average."""
        return self.signal + self.variance / weight

    def add(self, stats: GradientStats, smoothing: float) -> bool:
        """Learn from one step, unless its numbers are not finite (too few units, a loss scale that was too large)."""
        if not (math.isfinite(stats.variance) and math.isfinite(stats.mean_sqnorm)):
            return False
        self._variance.add(stats.variance, smoothing)
        self._signal.add(stats.signal, smoothing)
        if math.isfinite(stats.along):
            self._along.add(stats.along, smoothing)
        return True

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {name: average.state_dict() for name, average in self._averages().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        for name, average in self._averages().items():
            average.load_state_dict(state[name])

    def _averages(self) -> dict[str, MovingAverage]:
        return {"variance": self._variance, "signal": self._signal, "along": self._along}
