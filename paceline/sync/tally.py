"""What a worker has done since a round began."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.records import Note, Plan, Progress, combine_all, without_stop

__all__ = ["Tally"]


class Tally:
    """Counts the steps of a round, the examples that all workers use in them, and this worker's notes."""

    def __init__(self) -> None:
        self._counted = 0.0
        self.clear()

    def clear(self) -> None:
        """A round begins."""
        self._notes: list[Note] = []
        self.steps = 0
        self.examples = 0
        self._epoch = 0
        self._rates = 0.0
        self.busy_seconds = 0.0
        """This worker's own work in these steps."""

    def add(self, plan: Plan, note: Note, rate: float = 0.0) -> None:
        """One more step is done, with this learning rate."""
        if not self.steps:
            self._epoch = plan.epoch
        self._notes.append(note)
        self.steps += 1
        self.examples += plan.batch
        self._rates += rate

    def worked(self, seconds: float) -> None:
        """This worker has been busy for so long since the last exchange ended, earlier steps included."""
        self.busy_seconds += seconds - self._counted
        self._counted = seconds

    def waited(self, seconds: float) -> None:
        """So much of the time from here on has passed already, without any work."""
        self._counted += seconds

    def met(self) -> None:
        """An exchange has ended; it need not be that of this round."""
        self._counted = 0.0

    @property
    def note(self) -> Note | None:
        """One for all steps so far; None if there was none."""
        return combine_all(self._notes) if self._notes else None

    @property
    def whole(self) -> Note:
        """The same, of no steps if there was none."""
        return self.note or Note(steps=0.0)

    @property
    def rate(self) -> float:
        """The mean learning rate of the steps so far."""
        return self._rates / self.steps if self.steps else 0.0

    def begin(self, now: Progress) -> Progress:
        """Where the round began."""
        epoch = self._epoch if self.steps else now.epoch
        return Progress(now.step - self.steps, epoch, now.examples - self.examples)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        # Who wanted this run to stop did not mean the one that goes on from here.
        note = None if self.note is None else list(msgspec.structs.astuple(without_stop(self.note)))
        return {
            "steps": self.steps,
            "examples": self.examples,
            "epoch": self._epoch,
            "rates": self._rates,
            "busy_seconds": self.busy_seconds,
            "note": note,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self.steps, self.examples = state["steps"], state["examples"]
        self._epoch, self._rates, self.busy_seconds = state["epoch"], state["rates"], state["busy_seconds"]
        self._notes = [] if state["note"] is None else [Note(*state["note"])]
