"""How the factor of a learning-rate rule gets into a step of the user's optimizer, and leaves it again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import LoopError, SettingError
from paceline.lr.scales import Scales, Scaling

__all__ = ["Factor", "scales_of"]

# These divide by a moving average of past gradients, or look at signs alone.
INDIFFERENT = (
    torch.optim.Adadelta,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)


def scales_of(rule: object, optimizer: Optimizer) -> Scales:
    """What the rule's factor multiplies: the learning rate, where it does not say."""
    found = rule.scales if isinstance(rule, Scaling) else Scales.RATE
    if found is Scales.GRADIENT and isinstance(optimizer, INDIFFERENT):
        raise SettingError(
            f"lr={rule!r} scales the gradient, by which {type(optimizer).__name__} divides: it would have no effect; "
            "use Scales.RATE"
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
        self._factor = 1.0
        self._scaled_in: object = None

    def apply(self, factor: float, step: object) -> None:
        """Before the optimizer steps. Called again in the same ``step``, it takes the gradients for scaled."""
        self._factor = factor
        if factor == 1.0:
            return
        if self._scales is Scales.RATE:
            self._multiply("lr")
            return
        self._multiply("weight_decay")
        if step is not self._scaled_in:
            self._scaled_in = step
            groups = self._optimizer.param_groups
            gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(gradients, factor)

    def take_back(self) -> None:
        """After it. What the optimizer has made of a setting in the step stays, without our factor."""
        settings, self._settings = self._settings, []
        for group, name, given, used in settings:
            now, group[name] = float(group[name]), given
            if now == used:
                continue
            if isinstance(given, Tensor):
                given.fill_(now / self._factor)
            else:
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
