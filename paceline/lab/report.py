"""What a run in the lab leaves: numbers for programs, a table for people."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.table import Table

from paceline.lab.cluster import Cluster, show_rate
from paceline.lab.measure import Measured

__all__ = ["EventReport", "Report", "WorkerReport", "check_table", "event_table", "worker_table"]


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, from its start to its end; bytes are those of its interface, headers included."""

    name: str
    rank: int
    exit: int | None
    """Its exit code, negative for the signal that ended it; None if it was never started."""
    ended_by: str | None = None
    """What the lab ended it for, if the lab did."""
    started: float = 0.0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    throttled_seconds: float = 0.0
    """Time in which its quota of the processor was used up."""
    waiting_seconds: float = 0.0
    """The rest: time in which it had nothing to do but wait."""
    bytes_sent: int = 0
    bytes_received: int = 0


class EventReport(msgspec.Struct, frozen=True):
    """An event, when it was due and when it happened, in seconds after the start; None if the run had ended."""

    what: str
    due: float
    happened: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known about a run in the lab."""

    cluster: str
    command: list[str]
    started: float
    """Seconds since the epoch at which all workers that do not come late were started."""
    seconds: float
    workers: list[WorkerReport]
    events: list[EventReport]
    exit: int
    """The exit code of the whole: that of the worker that failed first by itself."""


def worker_table(report: Report, cluster: Cluster) -> Table:
    """One line for each worker."""
    table = Table(title=f"{report.cluster}: {report.seconds:.1f} s", title_justify="left", box=None, pad_edge=False)
    for column in ("worker", "cpu", "link", "exit"):
        table.add_column(column)
    for column in ("wall s", "cpu s", "throttled s", "waiting s", "sent MB", "received MB"):
        table.add_column(column, justify="right")
    for given, found in zip(cluster.workers, report.workers, strict=True):
        link = show_rate(given.link.up)
        if given.link.down != given.link.up:
            link += f"/{show_rate(given.link.down)}"
        numbers = ["–"] * 6
        if found.exit is not None:
            times = (found.wall_seconds, found.cpu_seconds, found.throttled_seconds, found.waiting_seconds)
            traffic = (found.bytes_sent, found.bytes_received)
            numbers = [*(f"{each:.1f}" for each in times), *(f"{each / 1e6:.1f}" for each in traffic)]
        table.add_row(found.name, f"{given.cpu:g}", link, _ending(found), *numbers)
    return table


def event_table(events: Sequence[EventReport]) -> Table:
    """One line for each event."""
    table = Table("event", "due", "happened", box=None, pad_edge=False)
    for event in events:
        happened = "the run had ended" if event.happened is None else f"{event.happened:.2f} s"
        table.add_row(event.what, f"{event.due:.2f} s", happened)
    return table


def check_table(found: Sequence[Measured]) -> Table:
    """One line for each thing that was measured."""
    table = Table("", "", box=None, pad_edge=False)
    for column in ("asked", "measured", "ratio"):
        table.add_column(column, justify="right")
    table.add_column("")
    for each in found:
        asked, measured = f"{each.asked:g} cores", f"{each.found:.3f} cores"
        if each.what != "cpu":
            asked, measured = show_rate(round(each.asked)), f"{each.found / 1e6:.2f} Mbit/s"
        style = "" if each.good else "bold red"
        again = f"measured {each.tries} times" if each.tries > 1 else ""
        table.add_row(each.name, each.what, asked, measured, f"{each.ratio:.3f}", again, style=style)
    return table


def _ending(worker: WorkerReport) -> str:
    if worker.exit is None:
        return "not started"
    return f"{worker.exit}" if worker.ended_by is None else f"{worker.exit} ({worker.ended_by})"
