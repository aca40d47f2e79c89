"""A step that a worker does with its own examples alone: what its gradients mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.errors import LoopError
from paceline.records import Note, Plan

__all__ = ["own_gradients", "own_part"]


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
