"""What all batches that follow a statistical test have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from paceline.batch.criteria import next_size
from paceline.batch.fixed import check_size
from paceline.errors import SettingError
from paceline.given import check_numbers
from paceline.probe.moving import Moments
from paceline.records import Progress, Round
from paceline.roles import Need

__all__ = ["Adaptive", "check_fraction"]


@dataclass(kw_only=True)
class Adaptive(ABC):
    """A batch that grows when a test says that noise, not direction, is what the gradient consists of.

    Args:
        start: the first batch, all workers together.
        limit: the largest.
        every: steps from one test to the next; statistics are measured in these steps only, unless another role asks
            for more. Under Local SGD there is one at the end of every round that brings the steps to so many.
        growth: the largest factor of one test.
        shrink: the batch shrinks if a test asks for less than this part of it; None for never, as in the papers.
        multiple: sizes are rounded up to a multiple of it: of workers times micro-batch, say; ``start`` must be one.
        smoothing: of the moving averages of the statistics, for each measurement; 0 for those of the step alone.
        debiased: compare with the squared norm of the true gradient instead of that of the mean gradient, which is
            longer by the noise in it.
        population: the examples that there are, if the batch may become a good part of them: a mean over all is exact.
    """

    start: int
    limit: int
    every: int = 1
    growth: float = 2.0
    shrink: float | None = None
    multiple: int = 1
    smoothing: float = 0.9
    debiased: bool = False
    population: int | None = None

    needs: ClassVar[frozenset[Need]] = frozenset({Need.VARIANCE})

    _size: int = field(init=False, repr=False, compare=False)
    _since: int = field(init=False, repr=False, compare=False)
    _moments: Moments = field(init=False, repr=False, compare=False)
    _last_sqnorm: float = field(init=False, repr=False, compare=False)
    _example_weight: float = field(init=False, repr=False, compare=False)
    _in_vain: int = field(init=False, repr=False, compare=False)
    _told: bool = field(init=False, repr=False, compare=False)
    _remarks: list[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        self._size, self._since = self.start, 0
        self._moments = Moments(self._population)
        self._last_sqnorm, self._example_weight = math.nan, 1.0
        self._in_vain, self._told, self._remarks = 0, False, []

    @abstractmethod
    def asks_for(self) -> float:
        """The batch that passes the test, by what is known now; in units of weight."""

    def size(self, progress: Progress) -> int:
        """The present one."""
        return self._size

    def due(self, progress: Progress) -> bool:
        """Whether the step that follows ends with a test; none is needed when the batch cannot change any more."""
        return (self.shrink is not None or self._size < self._top) and self._since + 1 >= self.every

    def observe(self, round: Round) -> None:
        """Learn from a round, and test if it is time."""
        self._since += round.steps
        if self._since >= self.every and round.stats is not None:
            self._mind_units(round.stats.units)
        if not self._learn(round) or self._since < self.every:
            return
        self._since = 0
        self._size = next_size(
            self._size,
            self.asks_for() / self._example_weight,
            smallest=min(self.start, self._size),
            limit=self.limit,
            growth=self.growth,
            shrink=self.shrink,
            multiple=self.multiple,
        )

    def remarks(self) -> list[str]:
        """What was noticed since the last time."""
        said, self._remarks = self._remarks, []
        return said

    @property
    def _top(self) -> int:
        """The largest size that there is."""
        return self.limit // self.multiple * self.multiple

    @property
    def noise_scale(self) -> float:
        """The gradient noise scale by the moving averages: variance over the squared norm of the true gradient."""
        if not self._moments.known:
            return math.nan
        signal = self._moments.signal
        return self._moments.variance / signal if signal else math.inf

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "size": self._size,
            "since": self._since,
            "moments": self._moments.state_dict(),
            "last_sqnorm": self._last_sqnorm,
            "example_weight": self._example_weight,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back, within the limit and as a multiple of what there is now."""
        self._size = min(-(-state["size"] // self.multiple) * self.multiple, self._top)
        self._since = state["since"]
        self._moments.load_state_dict(state["moments"])
        self._last_sqnorm, self._example_weight = state["last_sqnorm"], state["example_weight"]

    def _learn(self, round: Round) -> bool:
        """Whether there was something to be learnt."""
        if round.stats is None:
            return False
        self._example_weight = round.weight / sum(note.examples for note in round.notes)
        if not self._moments.add(round.stats, self.smoothing):
            return False
        self._last_sqnorm = round.stats.mean_sqnorm
        return True

    def _mind_units(self, units: int) -> None:
        """Tell once if tests find nothing to compare: a balance may leave one worker alone with the whole batch."""
        self._in_vain = self._in_vain + 1 if units < 2 else 0
        # One test in vain is nothing: the last step of an epoch may be short.
        if self._in_vain == 2 and not self._told:
            self._told = True
            self._remarks.append(
                f"{type(self).__name__}: steps have one micro-batch of one worker, in which no noise can be seen, so "
                f"that the batch stays {self._size}; give a micro of at most half of the batch"
            )

    def _population(self) -> float | None:
        """In units of weight, as variances are."""
        return None if self.population is None else self.population * self._example_weight

    def _sqnorm(self) -> float:
        """What noise is compared with."""
        if self.debiased:
            return self._moments.signal
        if self.smoothing == 0.0:
            return self._last_sqnorm  # as published: of the step alone, however small it is by chance
        return self._moments.mean_sqnorm(self._size * self._example_weight)

    def _check(self) -> None:
        check_numbers(self)
        name = type(self).__name__
        check_size(f"{name}: start", self.start)
        check_size(f"{name}: limit", self.limit)
        if self.limit < self.start:
            raise SettingError(f"{name}: limit ({self.limit}) is below start ({self.start}); it must be at least that")
        for what, value in (("every", self.every), ("multiple", self.multiple)):
            if not isinstance(value, int) or value < 1:
                raise SettingError(f"{name}: {what} ({value!r}) must be a whole number of at least 1")
        if self.multiple > self.limit:
            raise SettingError(f"{name}: no multiple of {self.multiple} is within the limit ({self.limit}); raise it")
        if self.start % self.multiple:
            raise SettingError(f"{name}: start ({self.start}) must be a multiple of {self.multiple}, as all sizes are")
        if not self.start * self.growth >= self.start + self.multiple:
            raise SettingError(
                f"{name}: growth ({self.growth}) must be above 1, and reach from start ({self.start}) to the next "
                f"multiple of {self.multiple}, or the batch could never change"
            )
        if self.shrink is not None and not 0 < self.shrink < 1:
            raise SettingError(f"{name}: shrink ({self.shrink}) must be between 0 and 1, or None for never")
        if not 0 <= self.smoothing < 1:
            raise SettingError(f"{name}: smoothing ({self.smoothing}) must be at least 0 and below 1")
        if self.population is not None and self.population < max(2, self.limit):
            raise SettingError(
                f"{name}: population ({self.population}) is below the limit ({self.limit}); it is the number of all "
                "examples"
            )


def check_fraction(owner: object, name: str, value: float) -> None:
    """Refuse a bound of relative noise that no gradient can miss, or none can meet."""
    if not 0 < value < 1:
        raise SettingError(
            f"{type(owner).__name__}: {name} ({value}) must be between 0 and 1: it is the noise of a gradient that is "
            "allowed, over its length"
        )
