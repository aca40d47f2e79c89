"""The coordinate-wise norm test, which the theory of AdaGrad and Adam assumes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from paceline.batch.adaptive import Adaptive, check_fraction
from paceline.batch.criteria import coordinate_batch, tensor_batch
from paceline.errors import SettingError
from paceline.probe.moving import MovingAverage
from paceline.records import Round
from paceline.roles import Need

__all__ = ["CoordinateTest"]


@dataclass(kw_only=True)
class CoordinateTest(Adaptive):
    """The norm test for coordinates by themselves, or for whole tensors, in most of the model.

    To ask it of every coordinate (``quantile=1, per_tensor=False``) is the form that proofs need, and useless in
    practice: some coordinate always has a mean near zero. It needs the variance of every coordinate, so that in a step
    with a test a second vector as long as the gradient is summed over the workers, and two are held in memory: let
    ``every`` be large. What a test asks for is averaged over tests in its logarithm. The other settings are those of
    :class:`~paceline.batch.adaptive.Adaptive`, but for ``debiased`` and ``population``, which it has not.

    Args:
        eta: between 0 and 1: the noise of a coordinate over its mean.
        quantile: the part of all coordinates in which the test must hold.
        per_tensor: sum squares over each tensor first; tensors count as many coordinates as they have.
    """

    eta: float
    quantile: float = 0.9
    per_tensor: bool = True
    every: int = 10

    needs: ClassVar[frozenset[Need]] = frozenset({Need.VARIANCE, Need.COORDINATES})

    _asked: MovingAverage = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._asked = MovingAverage()
        check_fraction(self, "eta", self.eta)
        if not 0 < self.quantile <= 1:
            raise SettingError(f"CoordinateTest: quantile ({self.quantile}) must be above 0 and at most 1")
        if self.debiased or self.population is not None:
            raise SettingError(
                "CoordinateTest compares with the mean gradient as it is: it has no debiased form and no "
                "population; leave them out"
            )

    def asks_for(self) -> float:
        """The geometric mean of what the tests so far asked for, the later ones counting more."""
        return math.exp(self._asked.value)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**super().state_dict(), "asked": self._asked.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        super().load_state_dict(state)
        self._asked.load_state_dict(state["asked"])

    def _learn(self, round: Round) -> bool:
        known = super()._learn(round)
        if not known or round.coordinates is None:
            return False
        variances, means = round.coordinates
        if self.per_tensor:
            asked = tensor_batch(
                torch.tensor([float(each.sum(dtype=torch.float64)) for each in variances]),
                torch.tensor([float(each.double().square().sum()) for each in means]),
                torch.tensor([each.numel() for each in means]),
                self.eta,
                self.quantile,
            )
        else:
            flat = [torch.cat([each.reshape(-1) for each in tensors]) for tensors in (variances, means)]
            asked = coordinate_batch(flat[0], flat[1], self.eta, self.quantile)
        # One test may ask for nothing, or for more than there is; it must not outweigh the others for ever.
        bounded = min(max(asked, self._example_weight), self.limit * self._example_weight)
        self._asked.add(math.log(bounded), self.smoothing)
        return True
