"""Rules that look at the batch alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.batch.fixed import check_size
from paceline.records import Progress

__all__ = ["Linear", "SquareRoot"]


@dataclass(frozen=True)
class Linear:
    """The learning rate grows with the batch: batch / ``base`` times the optimizer's, which was chosen for ``base``."""

    base: int

    def __post_init__(self) -> None:
        check_size("Linear: base", self.base)

    def factor(self, progress: Progress, batch: int) -> float:
        """Batch over base."""
        return batch / self.base


@dataclass(frozen=True)
class SquareRoot:
    """The learning rate grows with the root of the batch: usual for Adam, whose steps do not grow with the gradient."""

    base: int

    def __post_init__(self) -> None:
        check_size("SquareRoot: base", self.base)

    def factor(self, progress: Progress, batch: int) -> float:
        """The root of batch over base."""
        return math.sqrt(batch / self.base)
