"""Batch sizes that are known in advance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import cast

from paceline.errors import SettingError
from paceline.records import Progress
from paceline.roles import Batch

__all__ = ["Fixed", "Schedule", "as_policy", "check_size"]


def as_policy(batch: int | Batch) -> Batch:
    """What ``Run(batch=…)`` takes: a policy as it is, a whole number as :class:`Fixed`."""
    if callable(getattr(batch, "size", None)):
        return cast(Batch, batch)
    if isinstance(batch, bool) or not isinstance(batch, Integral):
        raise SettingError(f"batch={batch!r} is neither a whole number nor a batch policy; give one, as in batch=64")
    return Fixed(int(batch))


@dataclass(frozen=True)
class Fixed:
    """Always the same number of examples, all workers together. ``batch=64`` is short for ``Fixed(64)``."""

    examples: int

    def __post_init__(self) -> None:
        check_size("batch", self.examples)

    def size(self, progress: Progress) -> int:
        """The fixed size."""
        return self.examples


@dataclass(frozen=True)
class Schedule:
    """A size for each stage of the training, by examples seen: ``Schedule({0: 64, 100_000: 256})``."""

    stages: Mapping[int, int]
    """From the number of examples seen (all workers together) to the size that holds from there on."""

    def __post_init__(self) -> None:
        if not isinstance(self.stages, Mapping):
            raise SettingError(f"Schedule: stages ({self.stages!r}) must be a dict, such as {{0: 64, 100_000: 256}}")
        if 0 not in self.stages:
            raise SettingError(f"the stages {dict(self.stages)} do not say how to begin; add a size for 0 examples")
        for begin, examples in self.stages.items():
            if begin < 0:
                raise SettingError(f"a stage begins at {begin} examples; it must be 0 or more")
            check_size("batch", examples)
        object.__setattr__(self, "stages", dict(sorted(self.stages.items())))

    @property
    def limit(self) -> int:
        """The largest size."""
        return max(self.stages.values())

    def size(self, progress: Progress) -> int:
        """The size of the last stage that has begun."""
        return [examples for begin, examples in self.stages.items() if begin <= progress.examples][-1]


def check_size(what: str, examples: int) -> None:
    """Refuse what is not a number of examples."""
    if not isinstance(examples, int) or isinstance(examples, bool) or examples < 1:
        raise SettingError(f"{what} ({examples!r}) must be a whole number of examples, at least 1")
