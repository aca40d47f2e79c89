"""``paceline doctor``: what this machine can do, what is missing, and how to get it."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.checks import Row, rows

__all__ = ["doctor"]


def doctor() -> None:
    """Look at this machine: what works, what is missing, and how to get it.

    Two processes really exchange numbers, which takes a few seconds. The exit code is 0 if everything works that
    training needs; the rest is optional.
    """
    screen = Console(highlight=False, emoji=False, markup=False)
    with screen.status("looking at this machine"):
        found = list(rows())
    table = Table("", "", "", show_header=False, box=None)
    for row in found:
        table.add_row(row.what, _verdict(row), Text(row.found, overflow="fold"))
    screen.print(table)
    broken = [row.what for row in found if row.essential and not row.ok]
    if broken:
        screen.print(f"\nTraining cannot work here: see {', '.join(broken)}.", style="bold red")
        raise typer.Exit(1)
    screen.print("\nReady to train: paceline demo", style="bold green")


def _verdict(row: Row) -> Text:
    if row.ok:
        return Text("ok", "green")
    return Text("broken", "bold red") if row.essential else Text("missing", "yellow")
