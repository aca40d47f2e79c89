"""Torch's schedulers by another clock than steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.errors import SettingError

__all__ = ["Pace"]


class Pace:
    """Moves a torch scheduler on by a count of your own: examples, or AdaScale's steps.

    A step of a batch that grows is worth more than one of the scheduler's steps. Call :meth:`step` after
    ``optimizer.step()`` in the place of ``scheduler.step()``: the scheduler does as many steps as the count has whole
    ones more. Give it to ``Run(stateful=…)`` instead of the scheduler.

    Args:
        scheduler: any torch scheduler that takes no metric.
        count: how far the training is, in the scheduler's steps: ``lambda: run.progress.examples / 32``, or
            ``lambda: adascale.steps``.
        last: the step of the scheduler that is its last. A count that comes by more than one may pass it, where
            ``OneCycleLR`` raises an error and ``CosineAnnealingLR`` rises again.
    """

    def __init__(self, scheduler: LRScheduler, count: Callable[[], float], *, last: int | None = None) -> None:
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise SettingError(
                f"Pace: scheduler ({type(scheduler).__name__}) must be one of torch's that take no metric, such as "
                "CosineAnnealingLR; ReduceLROnPlateau is stepped without a Pace"
            )
        if not callable(count):
            raise SettingError(f"Pace: count ({count!r}) must be a function, such as lambda: rule.steps")
        if last is not None and last < 1:
            raise SettingError(f"Pace: last ({last}) must be at least 1, or None for a schedule without an end")
        self._scheduler, self._count, self._last = scheduler, count, last
        self._done = 0

    def step(self) -> None:
        """Let the scheduler catch up."""
        whole = int(self._count()) if self._last is None else min(int(self._count()), self._last)
        while self._done < whole:
            self._scheduler.step()
            self._done += 1

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"done": self._done, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._done = state["done"]
        self._scheduler.load_state_dict(state["scheduler"])
