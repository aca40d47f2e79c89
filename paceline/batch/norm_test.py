"""The norm test: the batch grows when the gradient's noise is too large a part of its length."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.batch.adaptive import Adaptive, check_fraction
from paceline.batch.criteria import norm_test_batch
from paceline.errors import SettingError

__all__ = ["NormTest"]


@dataclass(kw_only=True)
class NormTest(Adaptive):
    """The norm test of Byrd et al. (2012), as in AdAdaGrad, and as in adaptive Local SGD for local batches.

    The standard deviation of the mean gradient may be ``eta`` times its length. In balance the batch is then
    1/eta^2 - 1 times the gradient noise scale (1/eta^2 times, if ``debiased``): instead of eta, that multiple can be
    given. Give one of the two; the others are as in :class:`~paceline.batch.adaptive.Adaptive`.

    Args:
        eta: between 0 and 1: 0.9 means a quarter of the noise scale, 0.7 about the noise scale, 0.5 three times it.
        noise_scales: the batch in balance, in gradient noise scales.
    """

    eta: float | None = None
    noise_scales: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.eta is None) == (self.noise_scales is None):
            raise SettingError(
                f"NormTest: give eta or noise_scales, not both and not neither (eta={self.eta}, "
                f"noise_scales={self.noise_scales})"
            )
        least = 1.0 if self.debiased else 0.0
        if self.noise_scales is not None and not least < self.noise_scales < math.inf:
            raise SettingError(f"NormTest: noise_scales ({self.noise_scales}) must be above {least:g}")
        check_fraction(self, "eta", self.bound)

    @classmethod
    def as_published(cls, *, start: int, limit: int, eta: float, every: int = 1) -> NormTest:
        """The rule of the papers: the numbers of one step decide, the batch jumps to what they ask for, and stays."""
        return cls(start=start, limit=limit, eta=eta, every=every, growth=math.inf, smoothing=0.0)

    @property
    def bound(self) -> float:
        """Eta, given or from the multiple of the noise scale."""
        if self.eta is not None:
            return self.eta
        assert self.noise_scales is not None
        return 1 / math.sqrt(self.noise_scales + (0 if self.debiased else 1))

    def asks_for(self) -> float:
        """Variance over eta^2 times the squared norm."""
        return norm_test_batch(self._moments.variance, self._sqnorm(), self.bound, self._population())
