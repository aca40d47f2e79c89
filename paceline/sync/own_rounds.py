"""When one worker would like to average, by its own steps and its own clock."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from paceline.errors import SettingError
from paceline.records import Progress
from paceline.sync.every import Every, as_every, seconds_of

__all__ = ["Geometric", "OwnRounds", "WhileNear", "as_own"]


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


@dataclass(frozen=True)
class WhileNear:
    """After so many ``steps`` while models are near each other, and after fewer while they are not: for Gossip.

    After a round in which models were further from their mean than ``times`` as far as a worker goes in one step, the
    next is half as long, down to one step; otherwise twice as long, up to ``steps``. How far they were is estimated by
    the exchanges of the round, so that each worker decides for itself.
    """

    steps: int
    times: float

    def after(self, steps: int, distance: float | None, stride: float) -> int:
        """The steps of the next round; without an exchange, or a step, nothing is known, and nothing changes."""
        if distance is None or not stride:
            return steps
        return max(1, steps // 2) if distance > self.times * stride else min(2 * steps, self.steps)


def as_own(every: Every | Geometric | WhileNear | int) -> Every | Geometric | WhileNear:
    """A whole number means steps; what cannot be a period is refused."""
    if isinstance(every, WhileNear):
        if not (isinstance(every.steps, int) and every.steps > 1):
            raise SettingError(f"every ({every!r}): its steps must be at least 2, or there is nothing to shorten")
        if not (isinstance(every.times, int | float) and 0 < every.times < math.inf):
            raise SettingError(f"every ({every!r}): its times must be a positive number, such as 20.0")
        return every
    if not isinstance(every, Geometric):
        return as_every(every)
    if not (isinstance(every.mean, int | float) and 1 <= every.mean < math.inf):
        raise SettingError(f"every ({every!r}): its mean must be at least 1 step; 1 averages after every step")
    return every


class OwnRounds:
    """Says after which steps a round of this worker ends. ``number`` makes its chances its own."""

    def __init__(self, every: Every | Geometric | WhileNear, number: int) -> None:
        self._every = every
        self._steps = every.steps if isinstance(every, WhileNear) else 0
        self._chance = random.Random(number)
        self._goes_on = False
        self.begin(Progress())

    def enter(self, at: Progress) -> None:
        """The loop begins, and with it a round, unless it goes on in one that a checkpoint was written in."""
        if not self._goes_on:
            self.begin(at)
        self._goes_on = False

    def begin(self, at: Progress) -> None:
        """A round begins."""
        self._at, self._since = at, time.monotonic()
        if isinstance(self._every, Geometric):
            self._steps = self._every.draw(self._chance)

    def learn(self, distance: float | None, stride: float) -> None:
        """In the round that ends models were so far from their mean, and its last step was so long."""
        if isinstance(self._every, WhileNear):
            self._steps = self._every.after(self._steps, distance, stride)

    def over(self, now: Progress) -> bool:
        """Whether it ends with the step that has led to ``now``."""
        if isinstance(self._every, Geometric | WhileNear):
            return now.step - self._at.step >= self._steps
        seconds = seconds_of(self._every, self._at)
        if seconds is not None:
            return time.monotonic() - self._since >= seconds
        return self._every.ends(self._at, now)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"at": msgspec.to_builtins(self._at), "steps": self._steps, "chance": self._chance.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the round in which it was saved; one that is measured by the clock begins anew."""
        self._at, self._since = msgspec.convert(state["at"], Progress), time.monotonic()
        self._steps = state["steps"]
        self._chance.setstate(state["chance"])
        self._goes_on = True
