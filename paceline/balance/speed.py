"""How fast each worker is, from what it was seen to do."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.balance.solver import Speed

__all__ = ["SpeedModel", "Sums", "Typical", "typical", "worth_of"]

OUTLIER = 2.0  # times the median seconds for an example, up or down
DIFFERENT = 0.05  # sizes that differ by less, as a part of them, say nothing about what an example takes
JUMP = 0.25  # by what part a speed must change at once to be another one, or a share to tell of another one
DRIFT = 0.03  # by what part a speed changes from look to look without a reason
COMPANY = 0.15  # and if others have more or less to do than before, and may share the machine
FORGET = 0.9  # what an older pair of sizes counts against a newer one
DOUBT = 2.0  # how much pairs must say, as (x / error)², to outweigh that time is proportional to examples
UNKNOWN = 0.05  # standard error of a speed, as a part of it, of which a single round is all that was seen
MOST_WORTH = 31.0  # usual shares that the fixed part of a step may be worth: with more, no share would help


class Typical(NamedTuple):
    """What a few steps of a worker were like."""

    examples: float
    seconds: float
    error: float | None
    """Standard error of the seconds, as a part of them; None of a single step, which says nothing about it."""


def typical(samples: Sequence[tuple[float, float]]) -> Typical | None:
    """The mean of a few steps, those left out that are far from the others; None if there are none."""
    used = [(examples, seconds) for examples, seconds in samples if examples > 0 and seconds > 0]
    if not used:
        return None
    # Of two the lower: the other one may be what is unusual.
    usual = statistics.median_low(seconds / examples for examples, seconds in used)
    near = [one for one in used if usual / OUTLIER <= one[1] / one[0] <= usual * OUTLIER]
    each = [seconds / examples for examples, seconds in near]
    error = statistics.stdev(each) / statistics.fmean(each) / len(each) ** 0.5 if len(each) > 1 else None
    return Typical(statistics.fmean(one[0] for one in near), statistics.fmean(one[1] for one in near), error)


def worth_of(slope: float, low: float, high: float, most: float) -> float:
    """What the fixed part of a step is worth, r = a / c examples, by how much longer more examples take.

    ``slope`` is log(t_high / t_low) / log(high / low), with the seconds t = c (r + n) of n = ``low`` and ``high``
    examples: 1 if time is proportional to examples, 0 if they make no difference. At most ``most``.
    """
    if slope >= 1:
        return 0.0
    least, largest = 0.0, most
    for _ in range(60):
        middle = (least + largest) / 2
        if math.log((middle + high) / (middle + low)) > slope * math.log(high / low):
            least = middle
        else:
            largest = middle
    return largest


class SpeedModel:
    """Seconds of a step of n examples: c (r + n), with the fixed part counted in examples, r = a / c.

    c is the mean over the last ``memory`` looks, so that noise does not move shares, unless it jumps: then what was
    before is forgotten, and a worker that has become slower is known at once. Nor does it count what was seen while
    anybody had another share: workers of one machine are faster while others have nothing to do. r comes from how much
    longer the steps of neighbouring plans took that had more examples, where that says more than noise; until then time
    is taken as proportional to examples. A worker that slows down keeps its r.
    """

    def __init__(self, affine: bool = True, memory: int = 5) -> None:
        self._affine, self._memory = affine, memory
        self._looks: list[Typical] = []
        self._sums = Sums()
        self._worth = 0.0

    @property
    def speed(self) -> Speed | None:
        """The present one; None before anything was seen."""
        if not self._looks:
            return None
        each = math.exp(statistics.fmean(map(self._level, self._looks)))
        return Speed(self._worth * each, each)

    @property
    def error(self) -> float:
        """Standard error of the present speed, as a part of it.

        By the steps of each look; where one had a single round, by how much the looks differ.
        """
        looks = self._looks
        if len(looks) < 2 or all(look.error is not None for look in looks):
            return math.hypot(*map(_error, looks)) / max(len(looks), 1)
        return statistics.stdev(map(self._level, looks)) / math.sqrt(len(looks))

    def moved(self, seen: Typical | None) -> bool:
        """Whether this share is another one than in the look before."""
        return seen is not None and bool(self._looks) and not _alike(seen, self._looks[-1])

    def add(self, seen: Typical, usual: float, anew: bool = False) -> None:
        """Learn from the steps of one plan; ``anew`` if what was seen before was seen under other conditions.

        ``usual`` is what an average worker has to do.
        """
        if self._looks and self._affine:
            self._compare(self._looks[-1], seen, COMPANY if anew else DRIFT, MOST_WORTH * usual)
        before = [] if anew else [look for look in self._looks if _alike(look, seen)]
        jumped = before and abs(self._level(seen) - statistics.fmean(map(self._level, before))) > JUMP
        self._looks = [seen] if jumped else [*before, seen][-self._memory :]

    def _compare(self, old: Typical, new: Typical, drift: float, most: float) -> None:
        more, longer = math.log(new.examples / old.examples), math.log(new.seconds / old.seconds)
        if abs(more) < DIFFERENT or not min(more, 0.0) - JUMP <= longer <= max(more, 0.0) + JUMP:
            return  # too near to tell anything, or another speed altogether
        weight = 1.0 / (_error(old) ** 2 + _error(new) ** 2 + drift**2)
        sizes = sorted((old.examples, new.examples))
        found = weight * more * more, weight * more * longer, *(weight * math.log(n) for n in sizes)
        self._sums = sums = Sums(
            *(FORGET * before + now for before, now in zip(self._sums, (weight, *found), strict=True))
        )
        slope = (DOUBT + sums.product) / (DOUBT + sums.square)
        low, high = math.exp(sums.low / sums.weight), math.exp(sums.high / sums.weight)
        self._worth = worth_of(slope, low, high, most)

    def _level(self, look: Typical) -> float:
        return math.log(look.seconds / (self._worth + look.examples))

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"looks": [tuple(look) for look in self._looks], "sums": tuple(self._sums), "worth": self._worth}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._looks = [Typical(*look) for look in state["looks"]]
        self._sums, self._worth = Sums(*state["sums"]), state["worth"] if self._affine else 0.0


def _error(look: Typical) -> float:
    return UNKNOWN if look.error is None else look.error


def _alike(one: Typical, other: Typical) -> bool:
    """Whether two looks were at about the same share."""
    return abs(math.log(one.examples / other.examples)) < JUMP


class Sums(NamedTuple):
    """Over pairs of neighbouring looks, with x and y the logarithms of the ratios of examples and of seconds."""

    weight: float = 0.0
    square: float = 0.0
    """Of x."""
    product: float = 0.0
    """Of x and y."""
    low: float = 0.0
    """Logarithm of the smaller number of examples."""
    high: float = 0.0
