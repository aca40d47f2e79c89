"""The inner-product test and the augmented one: only noise that turns the direction around counts in full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.batch.adaptive import Adaptive
from paceline.batch.criteria import augmented_batch, inner_product_batch
from paceline.errors import SettingError
from paceline.roles import Need

__all__ = ["AugmentedTest", "InnerProductTest"]


@dataclass(kw_only=True)
class InnerProductTest(Adaptive):
    """The inner-product test of Bollapragada, Byrd and Nocedal (2018): the step must point downhill often enough.

    The noise along the mean gradient may be ``theta`` times its length; noise across it is not looked at. The other
    settings are those of :class:`~paceline.batch.adaptive.Adaptive`.
    """

    theta: float = 0.9

    needs: ClassVar[frozenset[Need]] = frozenset({Need.VARIANCE, Need.DIRECTION})

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "theta", self.theta)

    def asks_for(self) -> float:
        """The variance along the mean gradient over theta^2 times the squared norm."""
        return inner_product_batch(self._moments.along, self._sqnorm(), self.theta, self._population())


@dataclass(kw_only=True)
class AugmentedTest(InnerProductTest):
    """The inner-product test and the orthogonality test: noise across the mean gradient may be ``nu`` times its length.

    The default of nu, tan 80 degrees, lets the step be far from the true direction as long as it points downhill.
    """

    nu: float = 5.84

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "nu", self.nu)

    def asks_for(self) -> float:
        """The larger of what the two tests ask for."""
        moments = self._moments
        return augmented_batch(moments.variance, moments.along, self._sqnorm(), self.theta, self.nu, self._population())


def _check_positive(owner: object, name: str, value: float) -> None:
    if not value > 0:
        raise SettingError(
            f"{type(owner).__name__}: {name} ({value}) must be above 0: it is the noise that is allowed, over the "
            "length of the gradient"
        )
