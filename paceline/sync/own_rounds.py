"""When one worker would like to average, by its own steps and its own clock."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from paceline.errors import SettingError
from paceline.records import Progress
from paceline.sync.every import Every, as_every, seconds_of

__all__ = ["Geometric", "OwnRounds", "as_own"]


@dataclass(frozen=True)
class Geometric:
    """After every step with probability 1 / ``mean``, each worker by chances of its own: for Gossip.

    That has no memory, as the clocks that SwarmSGD is analysed with (Nadiradze et al. 2021).
    """

    mean: float

    def draw(self, chance: random.Random) -> int:
        """How many steps until the next exchange: at least 1."""
        if self.mean == 1:
            return 1
        # The inverse of P(H > h) = (1 - 1 / mean)^h; 1 - random() is never 0.
        return 1 + int(math.log(1 - chance.random()) / math.log1p(-1 / self.mean))


def as_own(every: Every | Geometric | int) -> Every | Geometric:
    """A whole number means steps; what cannot be a period is refused."""
    if not isinstance(every, Geometric):
        return as_every(every)
    if not (isinstance(every.mean, int | float) and 1 <= every.mean < math.inf):
        raise SettingError(f"every ({every!r}): its mean must be at least 1 step; 1 averages after every step")
    return every


class OwnRounds:
    """Says after which steps a round of this worker ends. ``number`` makes its chances its own."""

    def __init__(self, every: Every | Geometric, number: int) -> None:
        self._every = every
        self._chance = random.Random(number)
        self.begin(Progress())

    def begin(self, at: Progress) -> None:
        """A round begins."""
        self._at, self._since = at, time.monotonic()
        self._steps = self._every.draw(self._chance) if isinstance(self._every, Geometric) else 0

    def over(self, now: Progress) -> bool:
        """Whether it ends with the step that has led to ``now``."""
        if isinstance(self._every, Geometric):
            return now.step - self._at.step >= self._steps
        seconds = seconds_of(self._every, self._at)
        if seconds is not None:
            return time.monotonic() - self._since >= seconds
        return self._every.ends(self._at, now)
