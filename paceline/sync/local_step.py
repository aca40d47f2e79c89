"""A step that a worker does with its own examples alone: what its gradients mean."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import LoopError
from paceline.records import Note, Plan

__all__ = ["LocalStep", "own_gradients", "own_part"]


class LocalStep:
    """What ways to average have in common that send nothing in a backward pass: gradients are in ``.grad`` alone."""

    @property
    def counts_backward(self) -> bool:
        """No."""
        return False

    def around(self, plan: Plan, last: bool) -> AbstractContextManager[Any]:
        """Nothing is sent in a backward pass."""
        return nullcontext()

    def after_backward(self) -> float:
        """Nothing was sent."""
        return 0.0

    def collect(self, plan: Plan) -> None:
        """The gradients stay where they are."""

    def flat_gradients(self) -> Sequence[Tensor] | None:
        """They are in ``.grad`` alone."""
        return None


def own_part(plan: Plan, rank: int, weight: float) -> float:
    """What a micro-batch's mean loss is multiplied by: its part of the worker's own examples."""
    return weight / plan.counts[rank]


def own_gradients(parameters: Sequence[nn.Parameter], plan: Plan, note: Note, name: str) -> None:
    """Make the gradients the mean over the worker's examples. Without any there are none: the optimizer does nothing.

    ``name`` is that of the method, for an error.
    """
    if not note.weight:
        if note.examples:
            raise LoopError(
                f"the weights given to step.backward in step {plan.step} add up to {note.weight}; under "
                f"{name} they must be positive on every worker that has examples"
            )
        for parameter in parameters:
            parameter.grad = None
    elif note.weight != note.examples:
        gradients = [gradient for each in parameters if (gradient := each.grad) is not None]
        torch._foreach_mul_(gradients, note.examples / note.weight)
