"""Horizontal bars as SVG: how long each contestant took, readable on light and on dark pages.

    python -m benchmarks.bars benchmarks/results/contest-hard-cluster-fashion-mnist.json --shown ddp --shown …

draws the times to the target of a contest: the results of one run of it, or of ``--keep`` with more seeds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chart import COLOURS
from benchmarks.contestants import HARD, OURS, Contestant
from paceline.compare.scale import nice

__all__ = ["Bar", "bars"]

WIDTH = 720
LEFT, RIGHT, TOP, BOTTOM = 220, 110, 34, 40  # around the bars; names stand on the left, values on the right
ROW, THICK = 24, 14
TICKS = 5


class Bar(NamedTuple):
    """One contestant."""

    name: str
    value: float | None
    """None: there is none, which ``told`` says why."""
    told: str
    """What stands behind the bar."""
    colour: int


def bars(title: str, across: str, rows: Sequence[Bar]) -> str:
    """The picture, from 0 to the largest value, one row below the other."""
    known = [row.value for row in rows if row.value is not None]
    if not known or min(known) < 0 or max(known) == 0:
        raise ValueError(f"bars need a value above 0, and none below, not {[row.value for row in rows]}")
    step = nice(max(known) / TICKS)
    end = step * math.ceil(max(known) / step - 1e-9)
    bottom = TOP + ROW * len(rows)
    unit = (WIDTH - LEFT - RIGHT) / end
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + BOTTOM}" role="img">',
        f"<title>{escape(title)}</title><style>{_style()}</style>",
        f'<text class="title" x="8" y="18">{escape(title)}</text>',
    ]
    for number in range(round(end / step) + 1):
        x = LEFT + number * step * unit
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{number * step:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{bottom + 34}" text-anchor="middle">{escape(across)}</text>')
    for at, row in enumerate(rows):
        y, long = TOP + ROW * at, (row.value or 0.0) * unit
        parts.append(
            f'<text class="c{row.colour}" x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(row.name)}</text>'
        )
        if row.value is not None:
            parts.append(f'<rect class="c{row.colour}" x="{LEFT}" y="{y + 5}" width="{long:.1f}" height="{THICK}"/>')
        parts.append(f'<text class="tick" x="{LEFT + long + 6:.1f}" y="{y + 16}">{escape(row.told)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _style() -> str:
    def colours(dark: bool) -> str:
        return "".join(f".c{at}{{fill:{pair[dark]}}}" for at, pair in enumerate(COLOURS))

    return (
        "text{font:12px system-ui,sans-serif}.title{font-weight:600;fill:#222}.tick{fill:#666}.grid{stroke:#8884;"
        f"fill:none}}{colours(False)}"
        f"@media(prefers-color-scheme:dark){{.title{{fill:#eee}}.tick{{fill:#aaa}}{colours(True)}}}"
    )


def contest(results: dict[str, Any], shown: Sequence[Contestant]) -> str:
    """The times to the target of a contest: ours in one colour, peers in another."""
    rows = []
    for one in shown:
        found = results["contestants"][one.name]
        seconds = found.get("time_to_target")
        accuracy = found.get("final_accuracy")
        missed = "failed" if accuracy is None else f"not reached: {accuracy:.1%}"
        rows.append(
            Bar(one.title, seconds, missed if seconds is None else f"{seconds:.0f} s", 0 if one.module == OURS else 1)
        )
    title = f"Seconds to {results['target']:.0%} of {results['task']} on {Path(results['cluster']).stem}"
    return bars(title, "seconds of training", rows)


def main() -> None:
    """Draw it, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON that a contest has written")
    parser.add_argument(
        "--shown", action="append", metavar="NAME", help="contestants, from top to bottom; default: all"
    )
    options = parser.parse_args()
    results = json.loads(options.results.read_text())
    there = {one.name: one for one in HARD if one.name in results["contestants"]}
    if unknown := [name for name in options.shown or () if name not in there]:
        parser.error(f"not in these results: {', '.join(unknown)}; there are {', '.join(there)}")
    print(contest(results, [there[name] for name in options.shown or there]), end="")


if __name__ == "__main__":
    main()
