"""No rule."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.records import Progress

__all__ = ["Constant"]


@dataclass(frozen=True)
class Constant:
    """The learning rate is the optimizer's, whatever the batch. The default; schedulers work as ever."""

    def factor(self, progress: Progress, batch: int) -> float:
        """Always 1."""
        return 1.0
