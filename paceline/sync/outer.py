"""A second optimizer, for the change of a whole round: DiLoCo, SlowMo, or any optimizer of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

__all__ = ["Outer", "nesterov", "slow_momentum"]

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def nesterov(lr: float = 0.7, momentum: float = 0.9) -> MakeOptimizer:
    """The outer optimizer of DiLoCo (Douillard et al. 2023): SGD with Nesterov momentum."""
    return lambda parameters: SGD(parameters, lr=lr, momentum=momentum, nesterov=True)


def slow_momentum(lr: float = 1.0, momentum: float = 0.5) -> MakeOptimizer:
    """The outer step of SlowMo (Wang et al. 2020): u <- momentum u + (x_0 - x_avg); x <- x_0 - lr u.

    The paper divides the change by the inner learning rate g and multiplies u by it again, which is the same while g is
    constant.
    """
    return lambda parameters: SGD(parameters, lr=lr, momentum=momentum)


class Outer:
    """Takes x_0 - x_avg, the change of all workers in a round, as the gradient of a step from x_0.

    x_0 is where the round began, x_avg the average of where the workers have come. All workers compute the same.
    """

    def __init__(self, make: MakeOptimizer) -> None:
        self._make = make
        self._anchors: list[nn.Parameter] = []
        self._optimizer: Optimizer | None = None

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Take the present values as where the round begins."""
        if [tuple(p.shape) for p in self._anchors] != [tuple(p.shape) for p in parameters]:
            self._anchors = [nn.Parameter(p.detach().clone()) for p in parameters]
            self._optimizer = self._make(self._anchors)
            return
        with torch.no_grad():
            torch._foreach_copy_([p.data for p in self._anchors], [p.detach() for p in parameters])

    def step(self, average: Sequence[Tensor]) -> list[Tensor]:
        """The new parameters, where the next round begins."""
        assert self._optimizer is not None
        for anchor, mean in zip(self._anchors, average, strict=True):
            anchor.grad = anchor.detach() - mean
        self._optimizer.step()
        self._optimizer.zero_grad()
        return [anchor.detach() for anchor in self._anchors]

    def state_dict(self) -> dict[str, Any]:
        """Where the round began, and the optimizer's state."""
        state = {} if self._optimizer is None else self._optimizer.state_dict()
        return {"anchors": [anchor.detach() for anchor in self._anchors], "optimizer": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        if state["anchors"]:
            self.begin(state["anchors"])
            assert self._optimizer is not None
            self._optimizer.load_state_dict(state["optimizer"])
