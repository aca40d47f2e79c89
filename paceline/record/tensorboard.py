"""Curves for TensorBoard."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from paceline.errors import SettingError
from paceline.events import Ended, Event, Gossiped, Measured, Resumed, StepDone
from paceline.record.appending import cannot_open, give_up
from paceline.record.exchanges import together
from paceline.record.pace import Pace

__all__ = ["TensorBoard"]

# Curves under Gossip: counts since the last point, means over it, and what is known now.
COUNTED = ("exchanges", "refusals", "timeouts", "lost", "late", "wider", "bytes_sent", "strangers", "unheard")
GOSSIP = (*COUNTED, "bits", "staleness", "distance", "spread", "members", "known")


class TensorBoard:
    """Writes curves that ``tensorboard --logdir folder`` shows.

    The horizontal axis is **examples**, not steps: runs whose batch grows can be compared only so. A point is the mean
    over the steps since the last point (of loss, speed, waiting share and gradient statistics) or the latest value (of
    learning rate and batch), at most one each ``every_seconds``; 0 writes every step, at about 0.4 ms each. The values
    of ``run.log`` are written as they come, under the names that the user gave.

    After a resume, the points that the lost part of the earlier run had written are withdrawn.
    """

    patient = True

    def __init__(self, folder: str | os.PathLike[str], *, every_seconds: float = 0.5) -> None:
        self._folder = Path(folder)
        self._every = every_seconds
        self._pace = Pace()
        self._last: StepDone | None = None  # the step that the next point will stand at
        self._gossip: Gossiped | None = None
        self._kernel: str | None = None
        self._examples = 0
        self._next_time = 0.0
        self._resumed = False
        self._failed = False
        try:
            self._writer = _open(self._folder)
        except OSError as error:
            raise cannot_open("TensorBoard files", self._folder, error) from error

    def record(self, event: Event) -> None:
        """Take one event; only what makes a point is written."""
        if self._failed:
            return
        try:
            self._take(event)
        except (OSError, ValueError) as error:
            self._fail(error)

    def close(self) -> None:
        """Write the last point and the file's end; an event that comes later begins a new file."""
        if self._failed:
            return
        try:
            self._write_point()
            self._writer.close()
        except (OSError, ValueError) as error:
            self._fail(error)

    def _take(self, event: Event) -> None:
        match event:
            case StepDone():
                if self._resumed:
                    self._begin_again(event.examples - event.batch)
                self._pace.add(event)
                self._last = event
                self._examples = event.examples
                # A clock that was set back must not silence the curves until it has caught up.
                if not self._next_time - self._every <= event.time < self._next_time:
                    self._write_point()
                    self._next_time = event.time + self._every
            case Gossiped():
                self._gossip = together(self._gossip, event)
                if event.kernel not in (None, self._kernel):
                    self._kernel = event.kernel
                    self._writer.add_text("gossip/kernel", event.kernel, self._examples, event.time)
            case Measured():
                for name, value in event.values.items():
                    self._writer.add_scalar(name, value, self._examples, event.time)
            case Resumed():
                self._resumed = True
            case Ended():
                self._write_point()
                self._writer.flush()

    def _begin_again(self, examples: int) -> None:
        self._resumed = False
        self._examples = examples
        self._writer.close()
        # TensorBoard forgets the points from this place on; the point at the checkpoint itself stays.
        self._writer = _open(self._folder, purge_step=examples + 1)

    def _write_point(self) -> None:
        step, pace = self._last, self._pace
        if step is None:
            return
        values = {
            "train/loss": pace.loss,
            "train/learning_rate": step.learning_rate,
            "train/batch": step.batch,
            "speed/examples_per_second": pace.examples_per_second,
            "speed/waiting_share": pace.waiting,
        }
        if not math.isnan(pace.efficiency):
            values["speed/efficiency"] = pace.efficiency
        if max(step.counts) - min(step.counts) > step.steps:
            values |= {f"share/worker_{rank}": count / step.steps for rank, count in enumerate(step.counts)}
        if step.drift is not None:
            values["train/drift"] = step.drift
        if self._gossip is not None:
            seen = {name: getattr(self._gossip, name) for name in GOSSIP}
            values |= {f"gossip/{name}": value for name, value in seen.items() if value is not None}
        if not math.isnan(pace.variance):  # not every step is measured
            values["gradient/variance"] = pace.variance
            values["gradient/signal"] = pace.signal
            values["gradient/noise_scale"] = pace.noise_scale
        for name, value in values.items():
            self._writer.add_scalar(name, value, step.examples, step.time)
        self._last = self._gossip = None
        self._pace = Pace()

    def _fail(self, error: Exception) -> None:
        self._failed = True
        give_up(f"TensorBoard files ({self._folder})", error)


def _open(folder: Path, purge_step: int | None = None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SettingError(
            "TensorBoard needs the package tensorboard, which is not installed; "
            "run: pip install 'paceline[tensorboard]'"
        ) from error
    # The queue only has to outlast a slow disk; ten seconds is what a killed run may lose.
    return SummaryWriter(str(folder), purge_step=purge_step, max_queue=1000, flush_secs=10)
