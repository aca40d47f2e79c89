"""A line chart as SVG: steps over time, one line for each worker, readable on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from paceline.compare.scale import nice, spread

__all__ = ["Span", "chart"]

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 96, 34, 40  # around the plot; names of lines stand on the right
TICKS = 5
APART = 14  # pixels between two names
# For light and for dark pages, in the order of the lines: told apart also by those who see few colours.
COLOURS = [("#0b6fb8", "#6db7f2"), ("#c2410c", "#fb9a5c"), ("#15803d", "#6fd08c"), ("#7e3aa8", "#c79af0")]

Points = Sequence[tuple[float, float]]


class Span(NamedTuple):
    """A part of the time in which something is different."""

    begin: float
    end: float
    name: str


def chart(title: str, across: str, lines: Mapping[str, Points], spans: Sequence[Span] = ()) -> str:
    """The picture; values hold from their point to the next, and the axis of values begins at 0."""
    if not 0 < len(lines) <= len(COLOURS) or not all(lines.values()):
        raise ValueError(f"a chart has one to {len(COLOURS)} lines with a point each, not {list(lines)}")
    end = max(x for points in lines.values() for x, _ in points)
    top = max(y for points in lines.values() for _, y in points)
    step = nice(max(top, 1e-9) / TICKS)
    scale = _Scale(max(end, 1e-9), step * math.ceil(max(top, 1e-9) / step))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{_style(len(lines))}</style>",
        f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>',
    ]
    parts += [_span(scale, span) for span in spans]
    parts += _axes(scale, step, across)
    names = spread([scale.y(points[-1][1]) for points in lines.values()], APART, HEIGHT - BOTTOM)
    for at, (name, points) in enumerate(lines.items()):
        parts.append(f'<path class="line c{at}" d="{_path(scale, points)}"/>')
        parts.append(f'<text class="name c{at}" x="{WIDTH - RIGHT + 8}" y="{names[at] + 4:.1f}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


class _Scale(NamedTuple):
    across: float
    up: float

    def x(self, value: float) -> float:
        return LEFT + value / self.across * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.up * (HEIGHT - TOP - BOTTOM)


def _path(scale: _Scale, points: Points) -> str:
    (x, y), *rest = points
    before = [value for _, value in points]
    changes = [point for point, value in zip(rest, before, strict=False) if point[1] != value]
    moves = "".join(f"H{scale.x(x):.1f}V{scale.y(y):.1f}" for x, y in changes)
    return f"M{scale.x(x):.1f} {scale.y(y):.1f}{moves}H{scale.x(scale.across):.1f}"


def _axes(scale: _Scale, step: float, across: str) -> list[str]:
    parts, right = [], WIDTH - RIGHT
    for number in range(round(scale.up / step) + 1):
        y = scale.y(number * step)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number * step:g}</text>')
    wide = nice(scale.across / TICKS)
    for number in range(int(scale.across / wide + 1e-9) + 1):
        x = scale.x(number * wide)
        y = HEIGHT - BOTTOM + 16
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="middle">{number * wide:g}</text>')
    middle = (LEFT + right) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(across)}</text>')
    return parts


def _span(scale: _Scale, span: Span) -> str:
    begin, end = scale.x(min(span.begin, scale.across)), scale.x(min(span.end, scale.across))
    return (
        f'<rect class="span" x="{begin:.1f}" y="{TOP}" width="{end - begin:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
        f'<text class="tick" x="{(begin + end) / 2:.1f}" y="{TOP - 4}" text-anchor="middle">{escape(span.name)}</text>'
    )


def _style(lines: int) -> str:
    def colours(dark: bool) -> str:
        return "".join(
            f"path.c{at}{{stroke:{COLOURS[at][dark]}}}text.c{at}{{fill:{COLOURS[at][dark]}}}" for at in range(lines)
        )

    return (
        "text{font:12px system-ui,sans-serif}.title{font-weight:600;fill:#222}.tick{fill:#666}.line{fill:none;"
        "stroke-width:2}.grid{stroke:#8884;fill:none}.span{fill:#8882}"
        f"{colours(False)}@media(prefers-color-scheme:dark){{.title{{fill:#eee}}.tick{{fill:#aaa}}{colours(True)}}}"
    )
