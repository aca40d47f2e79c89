"""What becomes of the optimizer's state (momentum, second moments) when parameters are averaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Average", "Keep", "OptimizerState", "Reset"]


class OptimizerState(Protocol):
    """Decides it."""

    def averaged(self, optimizer: Optimizer) -> list[Tensor]:
        """The tensors of the state that are averaged with the parameters."""

    def after(self, optimizer: Optimizer) -> None:
        """The parameters have been averaged."""


class Keep(NamedTuple):
    """Every worker keeps its own: nothing is sent, and momentum goes on in the direction of the own examples."""

    def averaged(self, optimizer: Optimizer) -> list[Tensor]:
        """None."""
        return []

    def after(self, optimizer: Optimizer) -> None:
        """Nothing."""


class Average(NamedTuple):
    """The state is averaged with the same weights as the parameters: as many numbers again for each kind of state."""

    def averaged(self, optimizer: Optimizer) -> list[Tensor]:
        """All floating-point tensors of the state, in the order of the parameters."""
        return [value for _, _, value in _floating(optimizer)]

    def after(self, optimizer: Optimizer) -> None:
        """Nothing: the tensors hold the average."""

    def layout(self, optimizer: Optimizer) -> list[Slot]:
        """What state there is."""
        return [
            Slot(at, key, tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for at, key, value in _floating(optimizer)
        ]

    def complete(self, optimizer: Optimizer, layouts: Sequence[Sequence[Slot]]) -> None:
        """Make room, of zeros, for state that another worker has and this one has not, since it has had no examples."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for at, key, shape, dtype in dict.fromkeys(slot for layout in layouts for slot in layout):
            parameter = parameters[at]
            kind: torch.dtype = getattr(torch, dtype)
            if shape == parameter.shape and key != "step":
                new = torch.zeros_like(
                    parameter, dtype=kind, requires_grad=False
                )  # arranged in memory as torch does it
            else:
                device = "cpu" if key == "step" else parameter.device  # where torch's optimizers keep their counters
                new = torch.zeros(shape, dtype=kind, device=device)
            optimizer.state[parameter].setdefault(key, new)


class Slot(NamedTuple):
    """One tensor of an optimizer's state."""

    parameter: int
    key: str
    shape: tuple[int, ...]
    dtype: str


def _floating(optimizer: Optimizer) -> Iterator[tuple[int, str, Tensor]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for at, parameter in enumerate(parameters):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor) and value.is_floating_point():
                yield at, key, value


class Reset(NamedTuple):
    """The optimizer begins anew in every round, as if it had just been made."""

    def averaged(self, optimizer: Optimizer) -> list[Tensor]:
        """None."""
        return []

    @torch.no_grad()
    def after(self, optimizer: Optimizer) -> None:
        """Forget all state; Adagrad alone makes its state when it is made, and has to find it."""
        if not isinstance(optimizer, torch.optim.Adagrad):
            optimizer.state.clear()
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["sum"].fill_(group["initial_accumulator_value"])
                optimizer.state[parameter]["step"].zero_()
