"""Shares for people who know their machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.balance.rounding import largest_remainder
from paceline.errors import SettingError
from paceline.given import is_number, list_of

__all__ = ["Fixed"]


@dataclass(frozen=True)
class Fixed:
    """Shares in proportion to weights, one for each worker: ``Fixed([2, 1, 1])`` gives half of the batch to rank 0.

    An array or a tensor of numbers will do, too.
    """

    weights: Sequence[float]

    def __post_init__(self) -> None:
        weights = list_of(is_number, self.weights)
        if weights is None:
            raise SettingError(
                f"Fixed: weights ({self.weights!r}) must be a list of numbers, one for each worker: Fixed([2, 1])"
            )
        object.__setattr__(self, "weights", weights)
        if not weights or not min(weights) >= 0 or not 0 < sum(weights) < math.inf:
            raise SettingError(f"Fixed: weights ({weights}) must be at least 0, finite, and not all 0")

    def split(self, batch: int, workers: int) -> list[int]:
        """Whole shares by the largest remainder."""
        if workers != len(self.weights):
            raise SettingError(
                f"there are {workers} workers, but {len(self.weights)} weights ({list(self.weights)}); give each one"
            )
        return largest_remainder(batch, self.weights)
