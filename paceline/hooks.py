"""Hooks on the user's optimizer, which stays theirs: attached here, and removed without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from paceline.errors import LoopError
from paceline.roles import Sync
from paceline.step import Phase, Step

__all__ = ["OptimizerHooks"]


class OptimizerHooks:
    """Before ``optimizer.step()``: the gradients must be ready; the learning-rate rule applies. After: synchronise."""

    def __init__(
        self, optimizer: Optimizer, current: Callable[[], Step | None], factor: Callable[[Step], float], sync: Sync
    ) -> None:
        self._current, self._factor, self._sync = current, factor, sync
        self._rates: list[Any] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        self.learning_rate = float(optimizer.param_groups[0]["lr"]) if "lr" in optimizer.param_groups[0] else 0.0
        """The learning rate of the first parameter group in the last step, with the factor of the rule."""

    def remove(self) -> None:
        """Give the optimizer back as it was."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self._current()
        if step is None:  # the user steps outside of the loop: not ours
            return
        if step.phase in (Phase.NEW, Phase.OPEN):
            raise step.left_early()
        if step.phase is not Phase.READY:
            raise LoopError(
                f"optimizer.step() was called twice in step {step.index}; call it once after the inner loop"
            )
        if any(given is not None for given in (*args[1:], kwargs.get("closure"))):
            raise LoopError(
                f"optimizer.step(closure) in step {step.index} would compute gradients that nobody averages; call "
                "optimizer.step() alone (optimizers that need a closure, such as LBFGS, cannot be used)"
            )
        factor = self._factor(step)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self.learning_rate = float(self._rates[0]) * factor
        if factor != 1.0:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self._current()
        if step is None:
            return
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        step.phase = Phase.APPLIED
        self._sync.after_step(step.plan)
