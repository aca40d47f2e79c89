"""The table: one row for each contestant, over all of its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from paceline.compare.trial import Trial

__all__ = ["COLUMNS", "Row", "cells", "heading", "rows", "terminal_table"]

COLUMNS = ("setting", "accuracy", "to target", "seconds", "examples/s", "sent", "waiting", "efficiency")
UNKNOWN = "–"


@dataclass(frozen=True)
class Row:
    """All trainings of one contestant, by seed."""

    label: str
    title: str
    """What the table says: a script has its whole command there."""
    trials: tuple[Trial, ...]

    @property
    def good(self) -> list[Trial]:
        """Those that came to their end."""
        return [trial for trial in self.trials if trial.error is None]

    @property
    def errors(self) -> list[str]:
        """What the others failed of, each with its seed."""
        return [f"seed {trial.seed}: {trial.error}" for trial in self.trials if trial.error is not None]

    @property
    def name(self) -> str:
        """The title, and how many trainings failed if some went well."""
        some = self.good and self.errors
        return f"{self.title} ({len(self.errors)} of {len(self.trials)} failed)" if some else self.title

    @property
    def shown(self) -> Trial | None:
        """The training that stands for all where a picture has room for one: the first that went well."""
        return next(iter(self.good), None)


def rows(titles: dict[str, str], trials: Sequence[Trial]) -> list[Row]:
    """A row for each label, in the order of ``titles``, which gives what the table says for it."""
    return [
        Row(label, title, tuple(one for one in trials if one.label == label))
        for label, title in titles.items()
        if any(one.label == label for one in trials)
    ]


def cells(row: Row, target: float | None) -> list[str] | None:
    """What stands under ``COLUMNS`` but for the first; None if no training went well."""
    good = row.good
    if not good:
        return None
    return [
        _spread([trial.accuracy for trial in good], "{:.1%}".format),
        UNKNOWN if target is None else _to_target(good, target),
        _spread([trial.seconds for trial in good], _seconds),
        _mean([trial.examples / trial.seconds if trial.seconds else None for trial in good], "{:,.0f}".format),
        _mean([trial.bytes_sent for trial in good], lambda value: decimal(round(value))),
        _mean([trial.waiting for trial in good], "{:.0%}".format),
        _mean([trial.efficiency for trial in good], "{:.0%}".format),
    ]


def terminal_table(found: Sequence[Row], target: float | None) -> Table:
    """For people; what failed says so in its row, and why below the table."""
    table = Table(caption=Text("\n".join(_failures(found))), caption_justify="left", caption_style="red")
    for at, column in enumerate(COLUMNS):
        table.add_column(heading(column, target), justify="right" if at else "left", overflow="fold")
    for row in found:
        values = cells(row, target)
        table.add_row(Text(row.name), *(values if values is not None else [Text("failed", "red")]))
    return table


def heading(column: str, target: float | None) -> str:
    """What stands above a column."""
    return f"to {target:.1%}" if column == "to target" and target is not None else column


def _failures(found: Sequence[Row]) -> list[str]:
    return [f"failed: {row.title}, {error}" for row in found for error in row.errors]


def _mean(values: Sequence[float | None], show: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    return show(statistics.fmean(known)) if known else UNKNOWN


def _spread(values: Sequence[float | None], show: Callable[[float], str]) -> str:
    """The mean and, of several, the smallest and the largest."""
    known = [value for value in values if value is not None]
    middle = _mean(known, show)
    return middle if len(known) < 2 else f"{middle} ({show(min(known))}…{show(max(known))})"


def _to_target(good: Sequence[Trial], target: float) -> str:
    found = [trial.seconds_to(target) for trial in good]
    reached = [value for value in found if value is not None]
    if not reached:
        return "not reached"
    told = f"{_seconds(statistics.fmean(reached))} s"
    return told if len(reached) == len(found) else f"{told} ({len(reached)} of {len(found)})"


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
