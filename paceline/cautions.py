"""What is no error in a loop, but hardly what its user wants: said in a warning."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from paceline.goal import Goal
from paceline.records import Progress

__all__ = ["Cautions"]


class Cautions:
    """The warnings of one loop.

    Args:
        rank: this worker's; what all see alike is said by rank 0 alone.
        batch_norm: the name of a layer that takes statistics over a worker's examples; empty if there is none.
    """

    def __init__(self, rank: int, batch_norm: str) -> None:
        self._rank, self._batch_norm = rank, batch_norm
        self.done: Goal | None = None
        """The goal that the loop has reached the last time."""
        self._nothing_learnt = False

    def mind_totals(self, goal: Goal, progress: Progress) -> None:
        """Who asks for one epoch in every turn of a loop of their own: goals count from the run's beginning."""
        if goal == self.done and goal.reached(progress):
            warnings.warn(
                f"run.steps({goal}) has nothing to do: it was asked for before, and done; it counts from the beginning "
                "of the run. For one epoch more in every turn of a loop of your own, write epochs=epoch + 1",
                stacklevel=3,
            )

    def mind_shares(self, counts: Sequence[int]) -> None:
        """Where shares differ, what a worker's batch norm sees depends on who takes how many; said once."""
        if not self._batch_norm or max(counts) - min(counts) <= 1:
            return
        layer, self._batch_norm = self._batch_norm, ""
        if self._rank == 0:
            warnings.warn(
                f"{layer} takes its statistics over each worker's own examples, which are {list(counts)} now: the "
                "result depends on who takes how many. GroupNorm or LayerNorm does not",
                stacklevel=4,
            )

    def mind_idleness(self, index: int) -> None:
        """The optimizer has not stepped in the step of that index; said once."""
        if not self._nothing_learnt:
            self._nothing_learnt = True
            warnings.warn(
                f"optimizer.step() was not called in step {index}, that of the optimizer that was given to Run: "
                "nothing was learnt",
                stacklevel=4,
            )
