"""Charts show what they are given."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

from paceline.compare.chart import BOTTOM, HEIGHT, LEFT, PHASES, RIGHT, TOP, WIDTH, Line, line_chart, timeline
from paceline.compare.trial import Piece
from tests.compare.fake import NASTY


def lines_of(picture: str) -> list[str]:
    return [path.attrib["d"] for path in ET.fromstring(picture).iter("path") if "line" in path.attrib["class"].split()]


def test_a_line_goes_from_corner_to_corner() -> None:
    picture = line_chart("a", "t", "seconds", [Line("one", [(0, 0), (5, 10), (10, 20)], 0)])
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    middle = f"{(LEFT + right) / 2:.1f} {(TOP + bottom) / 2:.1f}"
    assert lines_of(picture) == [f"M{LEFT:.1f} {bottom:.1f}L{middle}L{right:.1f} {TOP:.1f}"]
    texts = [text.text for text in ET.fromstring(picture).iter("text")]
    assert texts[-1] == "one"
    assert {"0", "5", "20", "seconds"} <= set(texts)


def test_lines_differ_in_more_than_their_colour() -> None:
    root = ET.fromstring(line_chart("a", "t", "s", [Line(str(at), [(0, 1), (1, at)], at) for at in range(7)]))
    paths = [path.attrib for path in root.iter("path") if "line" in path.attrib["class"].split()]
    assert len({path.get("stroke-dasharray", "") for path in paths}) == 7
    assert len({path["class"] for path in paths}) == 7


def test_the_picture_can_be_told() -> None:
    picture = line_chart("here", "Accuracy", "seconds", [Line("one", [(0, 0.5), (10, 0.9)], 0)], percent=True)
    svg = ET.fromstring(picture).find("svg")
    assert svg is not None
    ids = svg.attrib["aria-labelledby"].split()
    told = {child.attrib["id"]: child.text for child in svg if "id" in child.attrib}
    assert [told[one] for one in ids] == ["Accuracy", "Over seconds. Last values: one: 90.0% at 10."]
    assert svg.attrib["role"] == "img"


def test_companions_are_faint_and_have_no_name() -> None:
    root = ET.fromstring(line_chart("a", "t", "s", [Line("one", [(0, 1)], 0), Line("one", [(0, 2)], 0, main=False)]))
    assert sum("faint" in path.attrib["class"] for path in root.iter("path")) == 1
    assert [text.text for text in root.iter("text")].count("one") == 1


def test_what_is_not_finite_is_left_out() -> None:
    points = [(0.0, 1.0), (1.0, math.nan), (2.0, math.inf), (3.0, 2.0)]
    (shape,) = lines_of(line_chart("a", "t", "s", [Line("one", points, 0), Line("two", points[1:3], 1)]))
    assert shape.count("L") == 1
    assert "nothing was recorded" in line_chart("a", "t", "s", [Line("two", points[1:3], 1)])


def test_any_letters_may_be_in_a_name() -> None:
    picture = line_chart("a", NASTY, NASTY, [Line(NASTY, [(0, 1)], 0)])
    root = ET.fromstring(picture)
    assert root.find(".//b") is None
    assert root.find("figcaption").text == NASTY  # type: ignore[union-attr]
    assert "<script" not in timeline("a", NASTY, [(NASTY, [Piece(0, 1, 1, 1, 0, 1, 0, 0)])])


def test_a_time_line_is_to_scale() -> None:
    # Two steps of 50 ms, which the plot of 382 pixels shows in 191 each; the rest of a step belongs to nothing.
    steps = [Piece(0.0, 0.05, 8, 8, 0.0, 0.025, 0.0, 0.012), Piece(0.05, 0.05, 8, 8, 0.01, 0.02, 0.02, 0.5)]
    root = ET.fromstring(timeline("a", "t", [("w0", steps)]))
    found = [(rect.attrib["class"], float(rect.attrib["x"]), float(rect.attrib["width"])) for rect in root.iter("rect")]
    assert [name for name, _, _ in found] == ["compute", "communicate", "load", "compute", "wait"]
    scale = (WIDTH - 12 - LEFT) / 100
    assert [(round((x - LEFT) / scale), round(wide / scale)) for _, x, wide in found] == [
        (0, 25),
        (25, 12),
        (50, 10),
        (60, 20),
        (80, 20),
    ]
    assert len({rect.attrib["height"] for rect in root.iter("rect")}) == len(PHASES)
    assert len(re.findall('class="edge"', timeline("a", "t", [("w0", steps)]))) == 2
    assert "nothing was recorded" in timeline("a", "t", [("w0", [])])
