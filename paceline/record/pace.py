"""Means over several steps, for displays that show fewer points than there are steps."""

from __future__ import annotations

import math
from datetime import timedelta

from paceline.events import StepDone

__all__ = ["Pace", "duration"]


def duration(seconds: float) -> str:
    """Seconds as people read them: ``1:02:03``."""
    if not math.isfinite(seconds):
        return "?"
    return str(timedelta(seconds=round(seconds)))


class Pace:
    """Sums over the steps so far. With ``keep`` below one, older steps fade: each new one scales the past by it."""

    def __init__(self, keep: float = 1.0) -> None:
        self._keep = keep
        self.steps = 0.0
        self.examples = 0.0
        self.seconds = 0.0
        self._loss = 0.0
        self._loss_examples = 0.0
        self._waited = 0.0
        self._workers_seconds = 0.0
        self._used = self._known_seconds = 0.0
        self._variance = 0.0
        self._signal = 0.0
        self._seen = 0.0

    def add(self, step: StepDone) -> None:
        """Count one more step, or all steps of a round."""
        keep, examples = self._keep, sum(step.counts)
        self.steps = keep * self.steps + step.steps
        self.examples = keep * self.examples + examples
        self.seconds = keep * self.seconds + step.seconds
        self._waited = keep * self._waited + sum(step.wait_seconds)
        self._workers_seconds = keep * self._workers_seconds + step.seconds * len(step.wait_seconds)
        if step.efficiency is not None:
            self._used = keep * self._used + step.seconds * step.efficiency
            self._known_seconds = keep * self._known_seconds + step.seconds
        if math.isfinite(step.loss):  # one bad step must not hide all good ones that follow
            self._loss = keep * self._loss + step.loss * examples
            self._loss_examples = keep * self._loss_examples + examples
        stats = step.stats
        if stats is not None and not math.isnan(stats.variance):
            self._variance = keep * self._variance + stats.variance * stats.weight
            self._signal = keep * self._signal + stats.signal * stats.weight
            self._seen = keep * self._seen + stats.weight

    @property
    def loss(self) -> float:
        """Mean loss, each step weighted by its examples; NaN if there was none."""
        return self._loss / self._loss_examples if self._loss_examples else math.nan

    @property
    def examples_per_second(self) -> float:
        """Speed of the whole fleet."""
        return self.examples / self.seconds if self.seconds else 0.0

    @property
    def waiting(self) -> float:
        """Share of all workers' time that they spent on waiting for the slowest."""
        return self._waited / self._workers_seconds if self._workers_seconds else 0.0

    @property
    def efficiency(self) -> float:
        """Examples per second over the sum of what the workers would do alone; NaN where that is not known."""
        return self._used / self._known_seconds if self._known_seconds else math.nan

    @property
    def variance(self) -> float:
        """Mean variance of one example's gradient; NaN where the probe saw nothing."""
        return self._variance / self._seen if self._seen else math.nan

    @property
    def signal(self) -> float:
        """Mean squared norm of the true gradient; NaN where the probe saw nothing."""
        return self._signal / self._seen if self._seen else math.nan

    @property
    def noise_scale(self) -> float:
        """Ratio of the two means: the ratio of one step is far too noisy (McCandlish et al. 2018, appendix A)."""
        if math.isnan(self.signal):
            return math.nan
        return self.variance / self.signal if self.signal > 0 else math.inf
