"""Charts as SVG, to stand in a page whose style has the colours: see :mod:`paceline.compare.style`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from paceline.compare.scale import Axis, axis_over, spread
from paceline.compare.style import COLOURS, DASHES
from paceline.compare.trial import Piece
from paceline.record.trace import consecutive

__all__ = ["Line", "frame", "line_chart", "sample", "timeline"]

# Small, so that letters are still readable where a page is as narrow as a telephone.
WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 46, 120, 12, 42  # around the plot; names of lines stand on the right
APART = 15  # pixels between two names
LONGEST = 14  # letters of a name
LANE, GAP = 26, 8  # pixels of a worker in a time line, and between two
# The height says the same as the colour, for those who do not see it.
PHASES = {"load": 0.45, "compute": 1.0, "wait": 0.2, "communicate": 0.7}


class Line(NamedTuple):
    """A line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    style: int
    """Which colour and which dashes."""
    main: bool = True
    """Drawn strongly, and with its name; others of the same style are faint companions."""


def frame(identity: str, title: str, told: str, height: float, parts: Iterable[str]) -> str:
    """A picture with a title and a description for those who do not see it."""
    return "\n".join(
        [
            f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height:g}" role="img" '
            f'aria-labelledby="{identity}-t {identity}-d"><title id="{identity}-t">{escape(title)}</title>'
            f'<desc id="{identity}-d">{escape(told)}</desc>',
            *parts,
            "</svg></figure>",
        ]
    )


def line_chart(
    identity: str,
    title: str,
    across: str,
    lines: Sequence[Line],
    *,
    of: str = "",
    percent: bool = False,
    from_zero: bool = True,
) -> str:
    """Lines over an axis that begins at 0; ``percent`` is for shares, and ``from_zero`` for the axis of values.

    ``of`` says in the description whose numbers they are, where only the text around the picture does.
    Values that are not finite are left out. Without any point there is a sentence instead of a picture.
    """
    lines = [line._replace(points=[p for p in line.points if all(map(math.isfinite, p))]) for line in lines]
    lines = [line for line in lines if line.points]
    if not lines:
        return f"<p>{escape(title)}: nothing was recorded.</p>"
    values = [y for line in lines for _, y in line.points]
    low = 0.0 if from_zero else min(values)
    most = 1.0 if percent and max(values) <= 1 else math.inf
    x = axis_over(0.0, max(x for line in lines for x, _ in line.points), LEFT, WIDTH - RIGHT)
    y = axis_over(low, max(values), HEIGHT - BOTTOM, TOP, whole=True, most=most)
    parts = [*_grid(x, y, across, percent)]
    parts += [_path(line, x, y) for line in sorted(lines, key=lambda line: line.main)]
    named = [line for line in lines if line.main]
    places = spread([y.at(line.points[-1][1]) for line in named], APART, HEIGHT - BOTTOM)
    for line, place in zip(named, places, strict=True):
        parts.append(_name(line, x.at(line.points[-1][0]), y.at(line.points[-1][1]), place))
    return frame(identity, title, _of(of) + _tell(named, across, percent), HEIGHT, parts)


def sample(style: int) -> str:
    """A short piece of a line, to stand beside a name."""
    return (
        f'<svg class="sample" viewBox="0 0 30 8" aria-hidden="true">{_stroke("M1 4H29", _classes(style), style)}</svg>'
    )


def timeline(identity: str, title: str, workers: Sequence[tuple[str, Sequence[Piece]]], *, of: str = "") -> str:
    """What workers did in these steps, one lane each; how much, not in which order within a step."""
    ends = [piece.begin + piece.seconds for _, pieces in workers for piece in pieces]
    if not ends:
        return f"<p>{escape(title)}: nothing was recorded.</p>"
    begin = min(piece.begin for _, pieces in workers for piece in pieces)
    height = TOP + len(workers) * (LANE + GAP) + BOTTOM
    x = axis_over(0.0, (max(ends) - begin) * 1e3, LEFT, WIDTH - 12, ticks=5)
    parts = [
        f'<text class="tick" x="{x.at(value):.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{value:g}</text>'
        for value in x.ticks()
    ]
    parts.append(_across("milliseconds", height))
    for lane, (name, pieces) in enumerate(workers):
        bottom = TOP + lane * (LANE + GAP) + LANE
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{bottom - 8}" text-anchor="end">{escape(name)}</text>')
        for piece in pieces:
            parts += _bars(piece, begin, bottom, x)
    parts.append(f'<path class="grid" d="M{LEFT} {height - BOTTOM}H{WIDTH - 12}"/>')
    told = "Time of each worker: loading, computing, waiting, communicating."
    return frame(identity, title, _of(of) + told, height, parts)


def _bars(piece: Piece, begin: float, bottom: float, x: Axis) -> Iterable[str]:
    since, until = (round(1e6 * (moment - begin)) for moment in (piece.begin, piece.begin + piece.seconds))
    left = since
    yield f'<path class="edge" d="M{x.at(since / 1e3):.1f} {bottom - LANE}V{bottom}"/>'
    for phase, end in zip(PHASES, consecutive(since, until, piece[-len(PHASES) :]), strict=True):
        wide = x.at(end / 1e3) - x.at(left / 1e3)
        if wide >= 0.05:
            tall = LANE * PHASES[phase]
            yield (
                f'<rect class="{phase}" x="{x.at(left / 1e3):.1f}" y="{bottom - tall:.1f}" width="{wide:.1f}" '
                f'height="{tall:.1f}"/>'
            )
        left = end


def _grid(x: Axis, y: Axis, across: str, percent: bool) -> Iterable[str]:
    for value in y.ticks():
        height = y.at(value)
        yield f'<path class="grid" d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}"/>'
        told = f"{100 * value:g}%" if percent else f"{value:g}"
        yield f'<text class="tick" x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{told}</text>'
    for value in x.ticks():
        yield (
            f'<text class="tick" x="{x.at(value):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{value:g}</text>'
        )
    yield _across(across, HEIGHT)


def _across(text: str, height: float) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return f'<text class="tick" x="{middle:g}" y="{height - 6:g}" text-anchor="middle">{escape(text)}</text>'


def _path(line: Line, x: Axis, y: Axis) -> str:
    places = [(x.at(across), y.at(up)) for across, up in line.points]
    shape = "M" + "L".join(f"{across:.1f} {up:.1f}" for across, up in places)
    ends = f'<circle class="{_classes(line.style)}" cx="{places[-1][0]:.1f}" cy="{places[-1][1]:.1f}" r="3"/>'
    return _stroke(shape, _classes(line.style, line.main), line.style) + (ends if line.main else "")


def _stroke(shape: str, classes: str, style: int) -> str:
    dashes = DASHES[style % len(DASHES)]
    return f'<path class="line {classes}"{f" stroke-dasharray={dashes!r}" if dashes else ""} d="{shape}"/>'


def _classes(style: int, main: bool = True) -> str:
    return f"c{style % len(COLOURS)}{'' if main else ' faint'}"


def _name(line: Line, across: float, up: float, place: float) -> str:
    """The name on the right, and a thin line to it from where its line ends."""
    short = line.name if len(line.name) <= LONGEST else line.name[: LONGEST - 1] + "…"
    right = WIDTH - RIGHT
    return (
        f'<path class="lead" d="M{across + 4:.1f} {up:.1f}H{max(across + 4, right):.1f}L{right + 8} {place:.1f}"/>'
        f'<text class="name {_classes(line.style)}" x="{right + 10}" y="{place + 4:.1f}">{escape(short)}</text>'
    )


def _of(name: str) -> str:
    return f"{name}. " if name else ""


def _tell(lines: Sequence[Line], across: str, percent: bool) -> str:
    """The last value of every line, in words."""
    show = "{:.1%}".format if percent else "{:.4g}".format
    ends = "; ".join(f"{line.name}: {show(line.points[-1][1])} at {line.points[-1][0]:.4g}" for line in lines)
    return f"Over {across}. Last values: {ends}."
