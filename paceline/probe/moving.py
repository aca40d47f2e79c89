"""Moving averages of noisy statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from paceline.records import GradientStats

__all__ = ["Moments", "MovingAverage"]


class MovingAverage:
    """An exponential moving average that is not biased towards where it starts.

    With the smoothing t, every value counts t times as much as the next one, times a weight of its own; the weights are
    divided by their sum. The smoothing may be another one each time: it says how much of the past is kept, and nothing
    of what the new value counts.
    """

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    @property
    def value(self) -> float:
        """The average; NaN before the first value."""
        return self._sum / self._weight if self._weight else math.nan

    def add(self, value: float, smoothing: float, weight: float = 1.0) -> None:
        """Take one more value."""
        self._sum = smoothing * self._sum + weight * value
        self._weight = smoothing * self._weight + weight

    def state_dict(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take that back."""
        self._sum, self._weight = state["sum"], state["weight"]


class Moments:
    """Averages over steps of what :class:`~paceline.records.GradientStats` estimates without bias.

    Variance and squared mean are averaged apart and divided afterwards: a mean of quotients would be far off. Neither
    depends on the batch of its step, so that a batch that changes does no harm, but their errors do: a squared mean is
    known as well as its batch is large, and counts as much; a variance, as it has units. Zero is the least that is
    given.

    Where examples are drawn without replacement out of a ``population`` (in units of weight), a mean over n of them has
    the variance sigma^2 / n (N - n) / (N - 1).
    """

    def __init__(self, population: Callable[[], float | None] | None = None) -> None:
        self._population = population
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
        return self.signal + self._noise(self.variance, weight)

    def add(self, stats: GradientStats, smoothing: float) -> bool:
        """Learn from one step, unless its numbers are not finite (too few units, a loss scale that was too large)."""
        if not (math.isfinite(stats.variance) and math.isfinite(stats.mean_sqnorm)):
            return False
        freedom = stats.units - 1.0
        self._variance.add(stats.variance, smoothing, freedom)
        self._signal.add(stats.mean_sqnorm - self._noise(stats.variance, stats.weight), smoothing, stats.weight)
        if stats.along is not None and math.isfinite(stats.along):
            self._along.add(stats.along, smoothing, freedom)
        return True

    def _noise(self, variance: float, weight: float) -> float:
        """Of a mean over so many."""
        population = None if self._population is None else self._population()
        if population is None or population <= 1:
            return variance / weight
        return variance / weight * max(population - weight, 0.0) / (population - 1)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {name: average.state_dict() for name, average in self._averages().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        for name, average in self._averages().items():
            average.load_state_dict(state[name])

    def _averages(self) -> dict[str, MovingAverage]:
        return {"variance": self._variance, "signal": self._signal, "along": self._along}
