"""How long to train."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import SettingError
from paceline.records import Progress

__all__ = ["Goal"]


@dataclass(frozen=True)
class Goal:
    """Where the loop ends, counted from the beginning of the run, so that a resumed run ends at the same place."""

    epochs: int | None = None
    examples: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        given = {k: v for k, v in vars(self).items() if v is not None}
        if len(given) != 1:
            told = ", ".join(f"{k}={v}" for k, v in given.items()) or "none"
            raise SettingError(f"run.steps needs exactly one of epochs=, examples=, steps=; given: {told}")
        ((name, value),) = given.items()
        if not isinstance(value, int) or value < 0:
            raise SettingError(f"run.steps({name}={value!r}): it must be a whole number of at least 0")

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if value is not None)

    def reached(self, progress: Progress) -> bool:
        """Whether the run has come this far."""
        if self.epochs is not None:
            return progress.epoch >= self.epochs
        if self.examples is not None:
            return progress.examples >= self.examples
        assert self.steps is not None
        return progress.step >= self.steps

    def left(self, progress: Progress) -> int | None:
        """Examples that may still be used, where the goal is a number of examples."""
        return None if self.examples is None else self.examples - progress.examples

    def as_progress(self) -> Progress:
        """The goal in the form in which events carry it."""
        return Progress(step=self.steps or 0, epoch=self.epochs or 0, examples=self.examples or 0)
