"""How the factor of a learning-rate rule gets into a step of the user's optimizer, and leaves it again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import LoopError, SettingError
from paceline.lr.scales import Scales, Scaling

__all__ = ["Factor", "scales_of"]

# Gradients multiplied by a number give the same steps: these divide by them, or look at signs or directions alone.
INDIFFERENT = tuple(
    kind
    for name in (
        "Adadelta",
        "Adafactor",
        "Adam",
        "Adamax",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SparseAdam",
    )
    if (kind := getattr(torch.optim, name, None)) is not None  # some are newer than the oldest torch that we support
)


def scales_of(rule: object, optimizer: Optimizer) -> Scales:
    """What the rule's factor multiplies: the learning rate, where it does not say."""
    found = rule.scales if isinstance(rule, Scaling) else Scales.RATE
    if not isinstance(found, Scales):
        raise SettingError(f"lr={rule!r}: scales ({found!r}) must be lr.Scales.RATE or lr.Scales.GRADIENT")
    if found is Scales.GRADIENT and isinstance(optimizer, INDIFFERENT):
        raise SettingError(
            f"lr={rule!r} scales the gradient, by which {type(optimizer).__name__} divides: it would have no effect; "
            "leave scales out (for Adam, power=0.5 is what others use)"
        )
    return found


class Setting(NamedTuple):
    """A number of a parameter group that is multiplied during a step."""

    group: dict[str, Any]
    name: str
    given: float | Tensor
    used: float


class Factor:
    """Multiplies the learning rates, or the gradients, of an optimizer for one step."""

    def __init__(self, optimizer: Optimizer, scales: Scales) -> None:
        self._optimizer, self._scales = optimizer, scales
        self._settings: list[Setting] = []
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._factor = 1.0

    def apply(self, factor: float) -> None:
        """Before the optimizer steps."""
        self._factor = factor
        if factor == 1.0:
            return
        if self._scales is Scales.RATE:
            self._multiply("lr")
        else:
            self._multiply("weight_decay")
            self._multiply_gradients()

    def take_back(self, stepped: bool) -> None:
        """After it. What the optimizer has made of a setting in a step stays, without our factor.

        Where it has not come to the end of its step, a setting that changed was set by somebody else, and stays so.
        """
        gradients, self._gradients = self._gradients, []
        for parameter, gradient in gradients:
            if parameter.grad is not None:  # the optimizer, or somebody after it, may have taken it away
                parameter.grad = gradient
        settings, self._settings = self._settings, []
        for group, name, given, used in settings:
            now = float(group[name])
            if now == used:
                group[name] = given
            elif stepped and isinstance(given, Tensor):
                group[name] = given.fill_(now / self._factor)
            elif stepped:
                group[name] = now / self._factor

    def _multiply(self, name: str) -> None:
        groups = self._optimizer.param_groups
        if name == "lr" and any("lr" not in group for group in groups):
            raise LoopError(
                f"{type(self._optimizer).__name__} has no learning rate that a rule could multiply; use lr.Constant()"
            )
        for group in groups:
            if name in group:
                given = group[name]
                group[name] = given * self._factor
                self._settings.append(Setting(group, name, given, float(group[name])))

    def _multiply_gradients(self) -> None:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:  # a worker that has no examples in this step
            return
        own = [p.grad for p in parameters]
        self._gradients = list(zip(parameters, own, strict=True))
        for parameter, gradient in zip(parameters, torch._foreach_mul(own, self._factor), strict=True):
            parameter.grad = gradient
