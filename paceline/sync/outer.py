"""A second optimizer, for the change of a whole round: DiLoCo, SlowMo, or any optimizer of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from paceline.errors import SettingError
from paceline.records import Note

__all__ = ["DiLoCo", "MakeOptimizer", "Outer", "SlowMo"]

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class DiLoCo:
    """The outer optimizer of DiLoCo (Douillard et al. 2023): SGD with Nesterov momentum."""

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_rates(self)

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Make it."""
        return SGD(parameters, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0)


@dataclass(frozen=True)
class SlowMo:
    """The outer step of SlowMo (Wang et al. 2020), where g is the learning rate of the optimizer of the loop::

        u <- momentum u + (x_0 - x_avg) / g
        x <- x_0 - lr g u

    As it was applied, with the factor of the lr role, in the mean over the steps of the round.
    """

    lr: float = 1.0
    momentum: float = 0.5

    def __post_init__(self) -> None:
        _check_rates(self)

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Make it."""
        return SGD(parameters, lr=self.lr, momentum=self.momentum)


def _check_rates(made: DiLoCo | SlowMo) -> None:
    settings: list[tuple[str, Any, float]] = [("lr", made.lr, math.inf), ("momentum", made.momentum, 1.0)]
    for name, value, most in settings:
        if not (isinstance(value, Real) and 0 <= float(value) < most):
            raise SettingError(
                f"{name} ({value!r}) of {type(made).__name__} must be a number of at least 0"
                + ("" if most == math.inf else ", below 1")
            )


class Outer:
    """Takes x_0 - x_avg, the change of all workers in a round, as the gradient of a step from x_0.

    x_0 is where the round began, x_avg the average of where the workers have come. All workers compute the same.
    """

    def __init__(self, make: MakeOptimizer) -> None:
        if isinstance(make, type) or not callable(make):
            name = make.__name__ if isinstance(make, type) else type(make).__name__
            raise SettingError(
                f"outer ({name}) must be a function from parameters to an optimizer, such as DiLoCo() or "
                "lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"
            )
        self._make = make
        self._anchors: list[nn.Parameter] = []
        self._of: list[int] = []
        self._optimizer: Optimizer | None = None

    def __repr__(self) -> str:
        return repr(self._make) if isinstance(self._make, DiLoCo | SlowMo) else "…"

    def forget(self) -> None:
        """Begin anew."""
        self._anchors, self._of, self._optimizer = [], [], None

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the present values as where the round begins."""
        self._of = list(map(id, parameters))
        self._start(parameters)

    def expect(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse others than those that the round began with."""
        if list(map(id, parameters)) != self._of:
            raise SettingError(
                f"{len(self._anchors)} parameters were trained when this round began, and {len(parameters)}, or "
                "others, are now; the outer optimizer needs the change of each, so freeze or thaw parameters in a new "
                "Run"
            )

    def _start(self, parameters: Sequence[Tensor]) -> None:
        if [tuple(p.shape) for p in self._anchors] != [tuple(p.shape) for p in parameters]:
            self._anchors = [nn.Parameter(p.detach().clone()) for p in parameters]
            self._optimizer = self._make(self._anchors)
            if not isinstance(self._optimizer, Optimizer):
                raise SettingError(
                    f"outer gave {self._optimizer!r} for a list of parameters, which is no torch optimizer; give "
                    "DiLoCo(), SlowMo() or a function that makes one"
                )
            return
        with torch.no_grad():
            torch._foreach_copy_([p.data for p in self._anchors], [p.detach() for p in parameters])

    def step(
        self, average: Sequence[Tensor], parameters: Sequence[nn.Parameter], notes: Sequence[Note]
    ) -> list[Tensor]:
        """New values for these parameters, where the next round begins; ``notes`` are those of all workers."""
        assert self._optimizer is not None
        self.expect(parameters)
        rate = self._rate(notes)
        if rate == 0.0:  # nothing was learnt, or nothing should have been
            self._start([mean.detach() for mean in average])
            return [anchor.detach() for anchor in self._anchors]
        for group in self._optimizer.param_groups:
            if isinstance(self._make, SlowMo):
                group["lr"] = self._make.lr * rate
        for anchor, mean in zip(self._anchors, average, strict=True):
            anchor.grad = (anchor.detach() - mean).div_(rate)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return [anchor.detach() for anchor in self._anchors]

    def state_dict(self) -> dict[str, Any]:
        """Where the round began, and the optimizer's state."""
        state = {} if self._optimizer is None else self._optimizer.state_dict()
        return {"anchors": [anchor.detach() for anchor in self._anchors], "optimizer": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back; DiLoCo and SlowMo go on with the settings of now, others with their own, as in torch."""
        if state["anchors"]:
            self._start(state["anchors"])
            assert self._optimizer is not None
            self._optimizer.load_state_dict(state["optimizer"])
            if isinstance(self._make, DiLoCo | SlowMo):
                self._optimizer.param_groups[0].update(lr=self._make.lr, momentum=self._make.momentum)

    @property
    def kind(self) -> str:
        """What makes it."""
        return type(self._make if isinstance(self._make, DiLoCo | SlowMo) else self._optimizer).__name__

    def _rate(self, notes: Sequence[Note]) -> float:
        """What SlowMo calls g; 1 for all others.

        Where workers have done different numbers of steps, their schedules are at different places: all take the mean
        by weight, so that all compute the same.
        """
        if not isinstance(self._make, SlowMo):
            return 1.0
        rates = {note.rate for note in notes if note.weight}
        if len(rates) == 1:
            return rates.pop()
        return sum(note.weight * note.rate for note in notes) / sum(note.weight for note in notes)
