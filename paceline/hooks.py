"""Hooks on the user's optimizer, which stays theirs: attached here, and removed without a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from paceline.errors import LoopError
from paceline.rate import Factor, scales_of
from paceline.step import Phase

if TYPE_CHECKING:
    from paceline.loop import Loop
    from paceline.run import Run

__all__ = ["OptimizerHooks"]


class OptimizerHooks:
    """Before ``optimizer.step()``: the gradients must be ready; the learning-rate rule applies. After: synchronise."""

    def __init__(self, run: Run, loop: Loop) -> None:
        self._run, self._loop = run, loop
        optimizer = run.optimizer
        self._parameters = _count(optimizer)
        self._factor = Factor(optimizer, scales_of(run.lr, optimizer))
        first = optimizer.register_step_post_hook(lambda *_: self._factor.take_back(stepped=True))
        # Before those that were there already: a scheduler in one of them works on the user's rate.
        hooks = first.hooks_dict_ref()
        assert hooks is not None
        hooks.move_to_end(first.id, last=False)
        self._handles = [
            first,
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Give the optimizer back as it was."""
        self.settle()
        for handle in self._handles:
            handle.remove()

    def settle(self) -> None:
        """If the optimizer has failed in a step, and somebody has caught that: its settings are the user's again."""
        self._factor.take_back(stepped=False)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self._loop.current
        if step is None:  # the user steps outside of the loop: not ours
            return
        if step.phase in (Phase.NEW, Phase.OPEN):
            raise step.left_early("optimizer.step()")
        if step.phase is not Phase.READY:
            raise LoopError(
                f"optimizer.step() was called twice in step {step.index}; call it once after the inner loop"
            )
        if step.emptied:
            raise LoopError(
                f"optimizer.zero_grad() was called between the inner loop of step {step.index} and optimizer.step(), "
                "which has no gradients now; put it before the inner loop"
            )
        if (args[1:] or kwargs) and any(given is not None for given in (*args[1:], kwargs.get("closure"))):
            raise LoopError(
                f"optimizer.step(closure) in step {step.index} would compute gradients that nobody averages; call "
                "optimizer.step() alone (optimizers that need a closure, such as LBFGS, cannot be used)"
            )
        if _count(optimizer) != self._parameters:
            self._refuse_strangers(optimizer)
        self.settle()
        factor = self._run.lr.factor(self._run.progress, self._loop.batch_of(step))
        self._run.replica.learning_rate = float(optimizer.param_groups[0].get("lr", 0.0)) * factor
        self._factor.apply(factor)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self._loop.current
        if step is None:
            return
        # A fused optimizer is called by the GradScaler also where gradients overflowed, and skips the step itself.
        if float(getattr(optimizer, "found_inf", None) or 0.0):
            return
        step.phase = Phase.APPLIED
        self._loop.advance(step)

    def _refuse_strangers(self, optimizer: Optimizer) -> None:
        if any(id(p) not in self._run.replica.known for group in optimizer.param_groups for p in group["params"]):
            raise LoopError(
                "the optimizer was given parameters after the run was made, whose gradients nobody averages; call "
                "add_param_group before Run(…), or make a new Run"
            )
        self._parameters = _count(optimizer)


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
