"""What an optimizer remembers of gradients, as numbers that can be averaged with the parameters."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline.errors import SettingError

__all__ = ["Moments"]

SQUARES = ("exp_avg_sq", "max_exp_avg_sq")  # means of squares: never below zero
STEP = "step"  # how often each parameter was updated: every worker's own, as its examples are


class Moments:
    """The momentum of SGD, or the moments of Adam and AdamW, of the parameters with these ids.

    All workers must lay them out alike from the beginning, and torch makes them in the first step only. So they are
    made here, as zeros, from which torch's optimizers come to the same numbers.
    """

    def __init__(self, optimizer: Optimizer, trained: Collection[int]) -> None:
        self._optimizer = optimizer
        self._slots = [
            (parameter, key, group)
            for group in optimizer.param_groups
            for key in _keys(optimizer, group)
            for parameter in group["params"]
            if id(parameter) in trained
        ]
        if not self._slots:
            raise SettingError(
                f"optimizer_state=Average(): this {type(optimizer).__name__} has no momentum that could be averaged; "
                "leave it out, or give momentum="
            )
        self.numel = sum(parameter.numel() for parameter, _, _ in self._slots)
        """How many numbers they are."""

    def tensors(self) -> list[Tensor]:
        """They, in the same order on all workers; what is missing is made."""
        return [self._slot(parameter, key, group) for parameter, key, group in self._slots]

    @torch.no_grad()
    def corrected(self) -> None:
        """Something has come that was made of older moments, or of coded ones: squares must not be below zero."""
        squares = [self._optimizer.state[parameter][key] for parameter, key, _ in self._slots if key in SQUARES]
        if squares:
            torch._foreach_clamp_min_(squares, 0.0)

    def _slot(self, parameter: Tensor, key: str, group: dict[str, Any]) -> Tensor:
        state = self._optimizer.state[parameter]
        if state.get(key) is None:
            state[key] = torch.zeros_like(parameter, requires_grad=False)
            if not isinstance(self._optimizer, SGD):
                there = parameter.device if group["capturable"] or group["fused"] else "cpu"
                state.setdefault(STEP, torch.zeros((), dtype=torch.float32, device=there))
        found: Tensor = state[key]
        return found


def _keys(optimizer: Optimizer, group: dict[str, Any]) -> list[str]:
    """The names under which torch keeps what is to be averaged."""
    if type(optimizer) in (Adam, AdamW):
        return ["exp_avg", *SQUARES[: 2 if group["amsgrad"] else 1]]
    if type(optimizer) is not SGD:
        raise SettingError(
            f"optimizer_state=Average() knows the state of SGD, Adam and AdamW, not of {type(optimizer).__name__}; "
            "use Keep()"
        )
    if group["dampening"]:
        raise SettingError(
            f"optimizer_state=Average() begins with momentum of zero, which dampening ({group['dampening']}) makes "
            "another start than torch's; use dampening=0, or Keep()"
        )
    return ["momentum_buffer"] if group["momentum"] else []
