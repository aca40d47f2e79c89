"""The report: one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from paceline.compare.chart import PHASES, Line, line_chart, sample, timeline
from paceline.compare.curves import curves, first_steps
from paceline.compare.rows import COLUMNS, Row, cells, heading
from paceline.compare.style import STYLE
from paceline.compare.trial import Point

__all__ = ["page"]

# The browser itself refuses whatever a page with this line would want to fetch or run.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "bytes": 1.0}


def page(title: str, facts: Mapping[str, str], found: Sequence[Row], target: float | None = None) -> str:
    """The whole report; ``facts`` stand below the title, and every text may hold any letters."""
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
        f"<h1>{escape(title)}</h1>",
        '<ul class="key">',
        *(f'<li><span class="soft">{escape(name)}</span> {escape(value)}</li>' for name, value in facts.items()),
        "</ul>",
        *_table(found, target),
        *_failures(found),
        *_accuracy(found),
        *_batch(found),
        *_workers(found),
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


def _table(found: Sequence[Row], target: float | None) -> Iterable[str]:
    yield '<h2 id="results">Results</h2><div class="scroll" tabindex="0" role="region" aria-labelledby="results">'
    yield "<table><thead><tr>"
    yield "".join(f'<th scope="col">{escape(heading(name, target))}</th>' for name in COLUMNS)
    yield "</tr></thead><tbody>"
    for style, row in enumerate(found):
        values = cells(row, target)
        if values is None:
            told = f'<td class="bad" colspan="{len(COLUMNS) - 1}">failed</td>'
        else:
            told = "".join(f"<td>{escape(value)}</td>" for value in values)
        yield f'<tr><th scope="row">{sample(style)}{escape(row.name)}</th>{told}</tr>'
    yield "</tbody></table></div>"
    yield (
        '<p class="soft">Means over the seeds, with the smallest and the largest. Seconds are those of training: where '
        "all workers stand still to evaluate, the clock does, too. Bytes are what worker 0 has sent. Waiting is the "
        "share of all workers' time; efficiency is the speed over the sum of what the workers would do alone.</p>"
    )


def _failures(found: Sequence[Row]) -> Iterable[str]:
    failed = [(row, error) for row in found for error in row.errors]
    if failed:
        yield "<h2>What failed</h2>"
    for row, error in failed:
        yield f"<p>{escape(row.title)}</p><pre>{escape(error)}</pre>"


def _accuracy(found: Sequence[Row]) -> Iterable[str]:
    if not any(trial.points for row in found for trial in row.good):
        return
    most = max((point.bytes_sent for row in found for trial in row.good for point in trial.points), default=0)
    unit, size = next((unit, size) for unit, size in UNITS.items() if most >= size or size == 1.0)
    views: dict[str, tuple[str, Callable[[Point], float]]] = {
        "time": ("seconds of training", lambda point: point.seconds),
        "examples": ("thousand examples", lambda point: point.examples / 1e3),
        "bytes": (f"{unit} sent by worker 0", lambda point: point.bytes_sent / size),
    }
    yield "<h2>Accuracy</h2>"
    if any(len(row.good) > 1 for row in found):
        yield '<p class="soft">Strong lines are the first seed, faint ones the others.</p>'
    yield '<div class="grid-of">'
    for name, (across, value) in views.items():
        lines = [
            Line(row.label, [(value(point), point.accuracy) for point in trial.points], style, trial is row.shown)
            for style, row in enumerate(found)
            for trial in row.good
        ]
        title = f"Accuracy against {name}"
        yield line_chart(f"accuracy-{name}", title, across, lines, percent=True, from_zero=False)
    yield "</div>"


def _batch(found: Sequence[Row]) -> Iterable[str]:
    shown = [(style, row.label, row.shown) for style, row in enumerate(found) if row.shown is not None]
    if shown:
        lines = [Line(label, curves(trial).batch, style) for style, label, trial in shown]
        yield '<h2>Batch size</h2><div class="grid-of">'
        yield line_chart("batch", "Examples in a step, all workers together", "seconds of training", lines)
        yield "</div>"


def _workers(found: Sequence[Row]) -> Iterable[str]:
    shown = [(at, row, row.shown) for at, row in enumerate(found) if row.shown is not None]
    if shown:
        yield "<h2>Workers</h2>"
        yield '<ul class="key">'
        for phase, tall in PHASES.items():
            shape = f'<rect class="{phase}" x="0" y="{14 * (1 - tall):g}" width="14" height="{14 * tall:g}"/>'
            yield f'<li><svg viewBox="0 0 14 14" aria-hidden="true">{shape}</svg>{phase}</li>'
        yield (
            '</ul><p class="soft">A time line shows how much of each step or round went to what, not the order within '
            "it. All pictures here are of one training: the first that went well.</p>"
        )
    for at, row, trial in shown:
        over, across = curves(trial), "seconds of training"
        shares, waiting = (
            [Line(f"worker {rank}", points, rank) for rank, points in enumerate(each)]
            for each in (over.shares, over.waiting)
        )
        yield f'<section><h3>{escape(row.title)}</h3><div class="grid-of">'
        yield line_chart(f"shares-{at}", "Share of the examples", across, shares, of=row.label, percent=True)
        yield line_chart(f"waiting-{at}", "Share of the time waited", across, waiting, of=row.label, percent=True)
        yield timeline(f"steps-{at}", "The first steps or rounds", first_steps(trial), of=row.label)
        yield "</div></section>"
