"""A round of local SGD as one worker does it: what it has done so far, and whether it is over."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.records import Note, Plan, Progress
from paceline.sync.every import Every, seconds_of
from paceline.sync.statistics import RoundStatistics
from paceline.sync.tally import Tally

__all__ = ["LocalRound"]


class LocalRound:
    """Counts steps until the models are averaged, round after round of one run.

    Args:
        every: how long a round is.
        statistics: what is measured in one of its steps.
        whole_epochs: it ends with the epoch, too.
    """

    def __init__(self, every: Every, statistics: RoundStatistics, whole_epochs: bool) -> None:
        self._every, self._whole_epochs = every, whole_epochs
        self.statistics = statistics
        self.tally = Tally()
        self.weight = 0.0
        """What this worker's model has learnt, in examples, since it was that of all."""
        self.scale = 0.0
        """What weights are divided by on the wire: the batch of the first step that was counted."""
        self._seconds: float | None = None

    def forget(self) -> None:
        """The model was given new values, the same on all workers."""
        self.statistics.give()
        self._seconds, self.weight = None, 0.0

    def look(self, plan: Plan, note: Note) -> None:
        """The gradients of a step are in ``.grad``. It counts when it is over: who leaves before has not done it."""
        self._pending = plan, self.statistics.look(note)

    def count(self, rate: float) -> tuple[Plan, Note]:
        """The step is over, and was done with this learning rate: gives its plan and note."""
        plan, note = self._pending
        self.agree_on_scale(plan)
        self.tally.add(plan, note, rate)
        self.statistics.count()
        self.weight += note.weight
        return plan, note

    def agree_on_scale(self, plan: Plan) -> None:
        """The same on all workers: who has counted no step takes this one, which the others have counted first."""
        self.scale = self.scale or float(plan.batch)

    def measures(self, progress: Progress, plan: Plan) -> bool:
        """Whether the step that begins here is the one to look at."""
        after = Progress(progress.step + 1, progress.epoch, progress.examples + plan.batch)
        return self.statistics.wants(self.tally.steps, self._every.ends(self.tally.begin(progress), after))

    def timed(self, progress: Progress) -> bool:
        """Whether it is measured by the clock; decided when it begins."""
        if self.tally.steps:  # a checkpoint may have brought half a round of steps
            return False
        self._seconds = seconds_of(self._every, progress)
        return self._seconds is not None

    def over(self, now: Progress) -> bool:
        """Whether it ends with the step that has led to ``now``."""
        if self._seconds is not None:  # with the step that comes nearest to it
            return self.tally.busy_seconds * (1 + 0.5 / self.tally.steps) >= self._seconds
        if self._whole_epochs and now.epoch > self._pending[0].epoch:
            return True  # what the epoch has taught is needed for the order of the next
        begin = self.tally.begin(now)
        # What began in steps, before a checkpoint, ends at once where rounds of seconds go on: no clock runs for it.
        return seconds_of(self._every, begin) is not None or self._every.ends(begin, now)

    def told(self, blocked_seconds: float, final: float = 0.0, leaves: bool = False) -> Note:
        """What this worker has to tell of it, having stood still for so long since the last one."""
        whole = self.tally.whole
        return msgspec.structs.replace(
            whole,
            busy_seconds=self.tally.busy_seconds,
            blocked_seconds=blocked_seconds,
            final=final,
            stop=max(1.0, whole.stop) if leaves else whole.stop,
            rate=self.tally.rate,
        )

    def state_dict(self) -> dict[str, Any]:
        """In the middle of it."""
        return {
            "tally": self.tally.state_dict(),
            "scale": self.scale,
            "weight": self.weight,
            "statistics": self.statistics.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self.tally.load_state_dict(state["tally"])
        self.scale, self.weight = state["scale"], state["weight"]
        self.statistics.load_state_dict(state["statistics"])
