"""Batches that grow by a plan: what an adaptive one must beat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.batch.fixed import Schedule, check_size
from paceline.errors import SettingError
from paceline.records import Progress

__all__ = ["GrowthSchedule"]


@dataclass(frozen=True)
class GrowthSchedule:
    """A batch that is multiplied by ``factor`` after every so many examples, from ``start`` until it reaches ``limit``.

    :meth:`stagewise` gives the other usual plan: few stages, each for a part of the training.
    """

    start: int
    factor: float
    every: int
    """Examples, all workers together."""
    limit: int

    def __post_init__(self) -> None:
        check_size("GrowthSchedule: start", self.start)
        check_size("GrowthSchedule: limit", self.limit)
        if self.limit < self.start:
            raise SettingError(f"GrowthSchedule: limit ({self.limit}) is below start ({self.start})")
        if not self.factor > 1:
            raise SettingError(f"GrowthSchedule: factor ({self.factor}) must be above 1; for no growth use Fixed")
        if not isinstance(self.every, int) or self.every < 1:
            raise SettingError(f"GrowthSchedule: every ({self.every!r}) must be a whole number of examples")

    def size(self, progress: Progress) -> int:
        """start * factor^(examples // every), within the limit."""
        power = progress.examples // self.every
        if power * math.log(self.factor) > math.log(self.limit / self.start):
            return self.limit
        return min(round(self.start * self.factor**power), self.limit)

    @staticmethod
    def stagewise(sizes: Sequence[int], parts: Sequence[float], examples: int) -> Schedule:
        """The ``sizes`` one after the other, each for its part of all ``examples``: 2.5 %, 2.5 % and 95 %, say."""
        if len(sizes) != len(parts) or not sizes or min(parts) <= 0 or not math.isclose(sum(parts), 1.0):
            raise SettingError(
                f"stagewise needs one part for each of the sizes {list(sizes)}, all above 0, with sum 1; not "
                f"{list(parts)}"
            )
        begins = [round(examples * sum(parts[:at])) for at in range(len(parts))]
        return Schedule(dict(zip(begins, sizes, strict=True)))
