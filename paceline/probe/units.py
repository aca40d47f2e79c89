"""What may count as a unit: the smallest group of examples whose gradient is seen on its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from paceline.errors import SettingError

__all__ = ["Example", "Loss", "MicroBatch", "Unit"]

Loss: TypeAlias = Callable[[Callable[..., Any], Any], Tensor]
"""``loss(model, batch)``: the mean loss of a collated batch, where ``model`` is called like the module."""


@dataclass(frozen=True)
class MicroBatch:
    """Each micro-batch is a unit: what it adds to ``.grad`` is seen for almost nothing, for any model.

    A worker needs no second micro-batch in a step, but all workers together need two for a variance.
    """


@dataclass(frozen=True)
class Example:
    """Each example is a unit: exact per-example gradients, for the price of more forward and backward passes.

    ``loss(model, batch)`` gives the scalar loss of a collated batch; it is called with batches of one example
    (leading dimension 1) and a stand-in for the model, under ``torch.func.vmap``. What is formed of gradients takes
    ``chunk_size`` times the memory of the gradient. Weights of plain linear and convolution layers are no part of
    that, so that more than ``chunk_size`` examples may be done at a time. Layers that mix the examples of a batch,
    such as BatchNorm in training mode, have no per-example gradients.
    """

    loss: Loss
    chunk_size: int = 16

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise SettingError(f"chunk_size ({self.chunk_size}) must be at least 1")


Unit: TypeAlias = MicroBatch | Example
