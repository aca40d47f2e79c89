"""What a run came to: where the time went, on which worker."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from paceline.events import Ended, Event, Gossiped, Measured, StepDone
from paceline.record.exchanges import sentence, together
from paceline.record.pace import Pace, duration

__all__ = ["Summary", "WorkerSummary", "summary", "table"]


class WorkerSummary(msgspec.Struct, frozen=True):
    """One worker: its examples, and the shares of the time of its steps."""

    examples: int
    load: float
    compute: float
    wait: float
    communicate: float

    @property
    def other(self) -> float:
        """What none of the four explains: the optimizer, evaluation, the user's own code."""
        return max(0.0, 1.0 - self.load - self.compute - self.wait - self.communicate)


class Summary(msgspec.Struct, frozen=True):
    """The totals of the steps that the events tell of; a step that was done again after a resume counts twice."""

    steps: int
    examples: int
    seconds: float
    """The time of all steps, what the user's loop did between them included."""
    loss: float
    """Of the last step; NaN if there was none."""
    bytes_sent: int
    """What the worker that has recorded handed to the network layer: rank 0, or under Gossip any."""
    measured: dict[str, float]
    """The last value of every name that was given to ``run.log``."""
    workers: tuple[WorkerSummary, ...]
    """By rank; under Gossip the one that has recorded."""
    efficiency: float
    """Examples per second over the sum of what the workers would do alone; NaN where that is not known."""
    reason: str | None
    """Why the run ended; None if the events do not say: it still runs, or was killed."""
    gossip: Gossiped | None = None
    """All that was exchanged in pairs, as one event; None under other ways to average."""

    @property
    def examples_per_second(self) -> float:
        """Speed of the whole fleet."""
        return self.examples / self.seconds if self.seconds else 0.0


class _Sums:
    """The seconds of one worker so far."""

    def __init__(self) -> None:
        self.examples = 0
        self.all = self.load = self.compute = self.wait = self.communicate = 0.0

    def shares(self) -> WorkerSummary:
        whole = self.all or math.inf
        return WorkerSummary(
            examples=self.examples,
            load=self.load / whole,
            compute=self.compute / whole,
            wait=self.wait / whole,
            communicate=self.communicate / whole,
        )


def summary(events: Iterable[Event]) -> Summary:
    """Sum up events, as :func:`~paceline.record.read` gives them. One pass: they need not fit into memory."""
    steps = examples = bytes_sent = 0
    pace, seconds, loss = Pace(), 0.0, math.nan
    measured: dict[str, float] = {}
    reason: str | None = None
    workers: list[_Sums] = []
    gossip: Gossiped | None = None
    for event in events:
        match event:
            case StepDone():
                steps += event.steps
                examples += sum(event.counts)
                seconds += event.seconds
                pace.add(event)
                loss = event.loss
                bytes_sent += event.bytes_sent
                reason = None
                _add(workers, event)
            case Gossiped():
                gossip = together(gossip, event)
            case Measured():
                measured.update(event.values)
            case Ended():
                reason = event.reason
    return Summary(
        steps=steps,
        examples=examples,
        seconds=seconds,
        loss=loss,
        bytes_sent=bytes_sent,
        measured=measured,
        workers=tuple(worker.shares() for worker in workers),
        efficiency=pace.efficiency,
        reason=reason,
        gossip=gossip,
    )


def _add(workers: list[_Sums], step: StepDone) -> None:
    # After a resume there may be more workers than before, or fewer: each has its own whole.
    workers.extend(_Sums() for _ in range(len(workers), len(step.counts)))
    for rank, count in enumerate(step.counts):
        worker = workers[rank]
        worker.examples += count
        worker.all += step.seconds
        worker.load += step.load_seconds[rank]
        worker.compute += step.compute_seconds[rank]
        worker.wait += step.wait_seconds[rank]
        worker.communicate += step.communicate_seconds


def table(summary: Summary) -> Table:
    """A summary for people: totals above, one row for each worker, measured values below."""
    first = 0 if summary.gossip is None else summary.gossip.worker
    efficient = "" if math.isnan(summary.efficiency) else f", efficiency {summary.efficiency:.0%}"
    title = (
        f"{summary.steps:,} steps, {summary.examples:,} examples, {duration(summary.seconds)}, "
        f"{summary.examples_per_second:,.0f} examples/s\n"
        f"last loss {summary.loss:.4g}{efficient}\n{decimal(summary.bytes_sent)} sent by worker {first}, "
        f"{summary.reason or 'no end recorded'}"
    )
    title += "" if summary.gossip is None else f"\n{sentence(summary.gossip)}"
    caption = "\n".join(f"{name} {value:.6g}" for name, value in summary.measured.items())
    # Text, not str: a name in brackets is not markup.
    result = Table(title=Text(title), caption=Text(caption) if caption else None)
    for heading in ("worker", "examples", "load", "compute", "wait", "communicate", "other"):
        result.add_column(heading, justify="right")
    for rank, worker in enumerate(summary.workers, start=first):
        shares = (worker.load, worker.compute, worker.wait, worker.communicate, worker.other)
        result.add_row(str(rank), f"{worker.examples:,}", *(f"{share:.1%}" for share in shares))
    return result
