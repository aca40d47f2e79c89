"""What a person sees while a run goes on."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import NamedTuple, TextIO

from paceline.balance.rounding import largest_remainder
from paceline.events import Ended, Event, Gossiped, Measured, Remark, Resumed, Saved, Started, StepDone
from paceline.record.appending import give_up
from paceline.record.display import Status, display_for
from paceline.record.exchanges import sentence, together
from paceline.record.pace import Pace, duration
from paceline.records import Progress

__all__ = ["Console", "Way", "way"]

_KEEP = 0.95  # the shown numbers are means over about 1 / (1 - 0.95) = 20 steps


class Way(NamedTuple):
    """How much of how much is done."""

    done: int
    total: int
    unit: str
    """What is counted: ``examples`` or ``steps``."""


def way(target: Progress | None, dataset: int, step: StepDone) -> Way | None:
    """The way to the target after this step; None if there is no target."""
    if target is None:
        return None
    if target.epoch and dataset:
        return Way(step.examples, target.epoch * dataset, "examples")
    if target.examples:
        return Way(step.examples, target.examples, "examples")
    if target.step:
        return Way(step.step + 1, target.step, "steps")
    return None


class Console:
    """Shows loss, speed, batch, waiting share and time left while the run goes on, and a line at its end.

    On a terminal it is a live display, redrawn at most five times a second, with the values of ``run.log`` (and
    whatever the program prints) above it. Anywhere else it is a plain line every few seconds. The default stream is
    standard error, so that standard output stays free for results.

    Loss, speed and waiting share are means over about the last twenty steps, or rounds of several; the waiting share is
    that of all workers' time. A loss that is not finite is shown at once. In the line at the end, speed and waiting
    share are those of the whole run. Under Gossip the numbers are the worker's own, and what it has exchanged since the
    last time is shown, too.
    """

    patient = True

    def __init__(self, stream: TextIO | None = None) -> None:
        self._display = display_for(sys.stderr if stream is None else stream)
        self._failed = False
        self._begin(None)

    def record(self, event: Event) -> None:
        """Take one event; most of them only update the numbers."""
        self._attempt(lambda: self._take(event))

    def say(self, text: str) -> None:
        """Print one line above the display."""
        self._attempt(lambda: self._display.say(text))

    def close(self) -> None:
        """Give the terminal back, the last state still on it; may be called twice."""
        self._attempt(lambda: self._display.stop(keep=True))

    def _attempt(self, action: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            action()
        except (OSError, ValueError) as error:  # ValueError: the stream is closed, or cannot encode a character
            self._failed = True
            give_up("the display on the console", error)

    def _begin(self, started: Started | None) -> None:
        self._target = started.target if started else None
        self._dataset = started.dataset if started else 0
        self._start_time = started.time if started else None
        self._recent = Pace(_KEEP)
        self._total = Pace()
        self._first: StepDone | None = None
        self._exchanged: Gossiped | None = None
        self._exchanged_in_all: Gossiped | None = None
        self._shown_time = -math.inf

    def _take(self, event: Event) -> None:
        match event:
            case StepDone():
                self._step(event)
            case Started():
                self._begin(event)
                many = "s" if event.workers != 1 else ""
                self._display.say(
                    f"{event.workers} worker{many}, {event.parameters:,} parameters, {event.dataset:,} examples"
                )
            case Gossiped():
                self._exchanged = together(self._exchanged, event)
                self._exchanged_in_all = together(self._exchanged_in_all, event)
            case Measured():
                values = "  ".join(f"{name} {value:.6g}" for name, value in event.values.items())
                self._display.say(f"step {event.step:,}: {values}", "cyan")
            case Remark():
                self._display.say(f"step {event.step:,}: {event.text}", "yellow")
            case Saved():
                self._display.say(f"step {event.step:,}: saved {event.path} ({event.seconds:.1f} s)")
            case Resumed():
                self._display.say(f"resumed at step {event.step:,} from {event.path}")
            case Ended():
                self._display.stop(keep=False)
                self._display.say(self._last_line(event), "bold" if event.reason == "done" else "bold yellow")

    def _step(self, event: StepDone) -> None:
        self._recent.add(event)
        self._total.add(event)
        self._first = self._first or event
        if self._start_time is None:
            self._start_time = event.time - event.seconds
        # The clock of the events decides; one that was set back must not freeze the display until it has caught up.
        if not 0 <= event.time - self._shown_time < self._display.every_seconds:
            self._shown_time = event.time
            self._display.show(self._status(event))
            self._exchanged = None

    def _status(self, step: StepDone) -> Status:
        recent = self._recent
        ahead = way(self._target, self._dataset, step)
        seconds_left = 0.0 if ahead is None else self._seconds_left(ahead, step)
        return Status(
            step=step.step + 1,
            epoch=step.epoch,
            epochs=self._target.epoch if self._target else 0,
            loss=recent.loss if math.isfinite(step.loss) else step.loss,
            examples_per_second=recent.examples_per_second,
            batch=step.batch,
            waiting=recent.waiting,
            efficiency=recent.efficiency,
            shares=tuple(largest_remainder(step.batch, step.counts) if any(step.counts) else step.counts),
            done=min(1.0, ahead.done / ahead.total) if ahead is not None else None,
            seconds_left=seconds_left,
            exchanges="" if self._exchanged is None else sentence(self._exchanged),
        )

    def _seconds_left(self, ahead: Way, step: StepDone) -> float:
        seconds, rate = self._recent.seconds, self._recent.steps
        if ahead.unit == "examples":
            rate = self._recent.examples
            if self._exchanged_in_all is not None and self._first is not None:
                # The goal is one of all workers; of the others only their examples are known.
                seconds, rate = step.time - self._first.time, float(step.examples - self._first.examples)
        return max(0, ahead.total - ahead.done) * seconds / rate if rate > 0 else math.inf

    def _last_line(self, event: Ended) -> str:
        seconds = event.time - self._start_time if self._start_time is not None else 0.0
        exchanged = "" if self._exchanged_in_all is None else f"; {sentence(self._exchanged_in_all)}"
        return (
            f"{event.reason}: {event.step:,} steps, {event.examples:,} examples in {duration(seconds)} "
            f"({self._total.examples_per_second:,.0f}/s), loss {self._recent.loss:.4g}, "
            f"waiting {self._total.waiting:.0%}{exchanged}"
        )
