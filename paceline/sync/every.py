"""When a round ends: after so many steps, examples or seconds, or by a schedule that changes while the run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import SettingError
from paceline.records import Progress

__all__ = ["Every", "Examples", "PostLocal", "Ramp", "Seconds", "Steps", "as_every", "seconds_of", "timed", "whole"]


class Every(Protocol):
    """Decides when workers average. All of them must come to the same answer, so it sees only what all know.

    A class of your own may also have ``seconds(begin)``: the length of the round that begins there, or None if that
    round is not measured by the clock.
    """

    def ends(self, begin: Progress, now: Progress) -> bool:
        """Whether the round that began at ``begin`` ends with the step that has led to ``now``."""


@dataclass(frozen=True)
class Steps:
    """After so many steps."""

    count: int

    def ends(self, begin: Progress, now: Progress) -> bool:
        """H steps have been done."""
        return now.step - begin.step >= self.count


@dataclass(frozen=True)
class Examples:
    """With the first step that brings the examples of all workers together to so many: robust where batches change."""

    count: int

    def ends(self, begin: Progress, now: Progress) -> bool:
        """So many examples have been used."""
        return now.examples - begin.examples >= self.count


@dataclass(frozen=True)
class Seconds:
    """After so many seconds of work, whatever each worker gets done in them: who is fast does more steps.

    Examples are dealt for that, and each worker's model counts as much as it has used. A round also ends with an epoch.
    """

    count: float

    def ends(self, begin: Progress, now: Progress) -> bool:
        """By the worker's own clock instead."""
        return False

    def seconds(self, begin: Progress) -> float:
        """The length of every round."""
        return self.count


@dataclass(frozen=True)
class PostLocal:
    """Average after every step at first, then as ``every`` says (Lin et al. 2020, post-local SGD).

    ``after`` is the number of steps that are synchronous.
    """

    after: int
    every: Every | int

    def ends(self, begin: Progress, now: Progress) -> bool:
        """Every step at first."""
        return now.step <= self.after or as_every(self.every).ends(begin, now)

    def seconds(self, begin: Progress) -> float | None:
        """Those of ``every``, once it has begun."""
        return None if begin.step < self.after else seconds_of(as_every(self.every), begin)


@dataclass(frozen=True)
class Ramp:
    """H is multiplied by ``factor`` after every so many ``steps``, from ``first`` until it reaches ``last``.

    It grows with a factor above 1, and shrinks with one below.
    """

    first: int
    last: int
    factor: float
    steps: int

    def ends(self, begin: Progress, now: Progress) -> bool:
        """H of the step at which the round began."""
        low, high = sorted((self.first, self.last))
        # Once it is there it stays there: no power has to be computed that no number holds.
        needed = math.log(self.last / self.first) / math.log(self.factor)
        count = self.first * self.factor ** min(begin.step // self.steps, math.ceil(needed))
        return now.step - begin.step >= min(max(round(count), low), high)


def seconds_of(every: Every, begin: Progress) -> float | None:
    """The length of the round that begins here, if it is measured by the clock."""
    seconds: Callable[[Progress], float | None] | None = getattr(every, "seconds", None)
    return None if seconds is None else seconds(begin)


def timed(every: Every) -> bool:
    """Whether rounds may be measured by the clock."""
    return timed(as_every(every.every)) if isinstance(every, PostLocal) else hasattr(every, "seconds")


def whole(count: object, least: int) -> bool:
    """Whether it is a whole number of at least so many; True and False are none."""
    return isinstance(count, int) and not isinstance(count, bool) and count >= least


def as_every(every: Every | int, what: str = "every") -> Every:
    """A whole number means steps; what cannot be a period is refused, by the name of the setting that it is."""
    if isinstance(every, type):
        raise SettingError(f"{what} ({every.__name__}) is a class; write {every.__name__}(…)")
    found: Every = Steps(every) if isinstance(every, int) else every
    if isinstance(found, Seconds):
        if not (isinstance(found.count, int | float) and 0 < found.count < math.inf):
            raise SettingError(f"{what} ({every!r}) must be a positive number of seconds")
        return found
    if not hasattr(found, "ends"):
        raise SettingError(f"{what} ({every!r}) must be a whole number of steps, Examples, Seconds or a schedule")
    ours = isinstance(found, Steps | Examples | Ramp)
    counts = [getattr(found, name) for name in ("count", "first", "last", "steps") if ours and hasattr(found, name)]
    if not all(whole(count, least=1) for count in counts):
        raise SettingError(f"{what} ({every!r}) must be whole numbers of at least 1; 1 averages after every step")
    if isinstance(found, Ramp) and not (
        0 < found.factor < math.inf and found.factor != 1 and (found.factor > 1) == (found.last > found.first)
    ):
        raise SettingError(f"{found!r} never gets from first to last; a factor above 1 grows, one below 1 shrinks")
    if isinstance(found, PostLocal):
        if not whole(found.after, least=0):
            raise SettingError(f"after ({found.after!r}) must be a whole number of steps, at least 0")
        as_every(found.every, what)
    return found
