"""What came of a contest: medians over the seeds, and the table for people."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.contestants import Contestant

__all__ = ["FIELDS", "Field", "show", "summarise"]


class Field(NamedTuple):
    """A number of the results, and how the table shows it."""

    title: str
    show: Callable[[float], str]


FIELDS = {
    "time_to_target": Field("to target, s", "{:.1f}".format),
    "final_accuracy": Field("accuracy", "{:.4f}".format),
    "examples_per_second": Field("examples/s", "{:.0f}".format),
    "bytes_sent": Field("MB sent", lambda value: f"{value / 1e6:.1f}"),
    "bytes_per_example": Field("bytes/example", "{:.0f}".format),
    "cpu_seconds": Field("cpu, s", "{:.0f}".format),
    "efficiency": Field("of alone", "{:.0%}".format),
    "largest_wait": Field("largest wait", "{:.0%}".format),
}


def summarise(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The medians of the rounds that went well and, of several, the smallest and largest values; what failed.

    Who died on the way failed, too, but what it had done until then counts. A target that was not reached counts as
    reached after all others: it is None in the end if most rounds missed it.
    """
    failed = [cause for one in rounds if (cause := one.get("failed") or one.get("died"))]
    good = [{name: one[name] for name in one if name != "died"} for one in rounds if "failed" not in one]
    found: dict[str, Any] = {"rounds": len(good), "failures": failed}
    for field in good[0] if good else ():
        values = sorted((one[field] for one in good), key=lambda value: (value is None, value))
        low, high = values[(len(values) - 1) // 2], values[len(values) // 2]
        found[field] = low if low == high else None if high is None else (low + high) / 2
        if len(values) > 1:
            found.setdefault("spread", {})[field] = [values[0], values[-1]]
    return found


def show(title: str, chosen: Sequence[Contestant], results: dict[str, dict[str, Any]], every: int) -> None:
    """The table for people, with a footnote for what was chosen for a contestant."""
    table = Table(title=title, title_justify="left")
    table.add_column("contestant")
    for field in FIELDS.values():
        table.add_column(field.title, justify="right")
    notes: list[str] = []
    for one in chosen:
        result, name = results[one.name], one.title
        if one.note:
            notes.append(one.note.format(every=every))
            name += f" [{len(notes)}]"
        cells = [_cell(result, field) for field in FIELDS] if result["rounds"] else ["failed"]
        table.add_row(_plain(name), *cells)
    # A file or a pipe has no width; the table needs some.
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    for number, note in enumerate(notes, 1):
        console.print(_plain(f"[{number}] {note}"))
    for one in chosen:
        for reason in results[one.name]["failures"]:
            console.print(_plain(f"failed: {one.title}: {reason}"))


def _cell(result: dict[str, Any], name: str) -> str:
    if result[name] is None:
        return "–"
    text = FIELDS[name].show(result[name])
    if "spread" in result:
        low, high = ("–" if value is None else FIELDS[name].show(value) for value in result["spread"][name])
        text += f"\n({low} … {high})"
    return text


def _plain(text: str) -> str:
    """Keep rich from taking brackets for markup."""
    return text.replace("[", r"\[")
