"""What an optimizer divides gradients by, number by number: Adam, and others that do as it does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from paceline.probe import Probe

__all__ = ["DIVISORS", "Divisor", "Preconditioner", "divisor_of", "factors_of"]

State = Mapping[str, Any]
"""What an optimizer keeps of one parameter, or the settings of its group."""


class Divisor(NamedTuple):
    """A gradient is divided by ``root + eps``."""

    root: Tensor
    eps: float


def adam(group: State, state: State) -> Divisor:
    """sqrt(v / (1 - beta2^t)) + eps; with ``amsgrad`` v is the largest that there was."""
    moment = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
    return Divisor(_wide(moment).sqrt() / math.sqrt(_debiased(group, state)), float(group["eps"]))


def radam(group: State, state: State) -> Divisor | None:
    """(sqrt(v) + eps) / sqrt(1 - beta2^t), once so many steps are done that RAdam divides at all."""
    beta, steps, debiased = float(group["betas"][1]), float(state["step"]), _debiased(group, state)
    if 2 / (1 - beta) - 1 - 2 * steps * (1 - debiased) / debiased <= 5:  # the paper's rho_t
        return None
    scale = math.sqrt(debiased)
    return Divisor(_wide(state["exp_avg_sq"]).sqrt() / scale, float(group["eps"]) / scale)


def adamax(group: State, state: State) -> Divisor:
    """The largest absolute gradient, which decays, and has eps in it."""
    eps = float(group["eps"])
    return Divisor(_wide(state["exp_inf"]) - eps, eps)


def adagrad(group: State, state: State) -> Divisor:
    """sqrt(sum of squares) + eps."""
    return Divisor(_wide(state["sum"]).sqrt(), float(group["eps"]))


def rmsprop(group: State, state: State) -> Divisor:
    """sqrt(mean of squares) + eps; ``centered``, minus the square of the mean."""
    moment = _wide(state["square_avg"])
    if group["centered"]:
        moment = (moment - _wide(state["grad_avg"]).square()).clamp_min(0.0)
    return Divisor(moment.sqrt(), float(group["eps"]))


# By class, not by what inherits from it: that may step otherwise.
DIVISORS: dict[type[Optimizer], Callable[[State, State], Divisor | None]] = {
    torch.optim.Adam: adam,
    torch.optim.AdamW: adam,
    torch.optim.NAdam: adam,
    torch.optim.RAdam: radam,
    torch.optim.Adamax: adamax,
    torch.optim.Adagrad: adagrad,
    torch.optim.RMSprop: rmsprop,
}


def divisor_of(optimizer: Optimizer, group: State, parameter: nn.Parameter) -> Divisor | None:
    """What the gradient of a parameter is divided by; None before its first step."""
    state = optimizer.state.get(parameter)
    if not state or not float(state["step"]):  # Adagrad has a state from the beginning
        return None
    return DIVISORS[type(optimizer)](group, state)


@torch.no_grad()
def factors_of(optimizer: Optimizer) -> dict[nn.Parameter, Tensor] | None:
    """1 / (root + eps) for the parameters that the optimizer divides gradients of; None if there are none yet.

    Zero where the root is zero: a number that had no gradient so far has no scale yet. Divided by eps, its first one
    would outweigh all others. So does that of a number whose gradients were tiny so far: the optimizer would take it
    into the root first, and a floor for roots would hide what numbers of different sizes are divided for.
    """
    found: dict[nn.Parameter, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (divisor := divisor_of(optimizer, group, parameter)) is not None:
                found[parameter] = torch.where(divisor.root > 0, 1 / (divisor.root + divisor.eps), 0.0)
    return found or None


class Preconditioner:
    """Lets a probe see gradients for an order as the optimizer has divided them when the epoch began."""

    def __init__(self, probe: Probe) -> None:
        assert probe.optimizer is not None
        self._probe, self._optimizer = probe, probe.optimizer
        self._factors: dict[nn.Parameter, Tensor] | None = None
        self.freeze()

    def freeze(self) -> bool:
        """An epoch begins. Whether gradients were not divided before and are from now on, or the reverse."""
        before = self._factors
        self._use(factors_of(self._optimizer))
        return (before is None) is not (self._factors is None)

    def factors(self) -> list[Tensor | None] | None:
        """For a checkpoint, since the optimizer has moved on: in its order of parameters."""
        return None if self._factors is None else [self._factors.get(each) for each in self._parameters()]

    def take_back(self, factors: Sequence[Tensor | None] | None) -> None:
        """Go on with those of a checkpoint."""
        if factors is None:
            self._use(None)
            return
        pairs = zip(self._parameters(), factors, strict=True)
        self._use({parameter: factor.to(parameter.device) for parameter, factor in pairs if factor is not None})

    def _use(self, factors: dict[nn.Parameter, Tensor] | None) -> None:
        self._factors = factors
        self._probe.precondition(factors)

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


def _debiased(group: State, state: State) -> float:
    return 1 - math.pow(float(group["betas"][1]), float(state["step"]))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
