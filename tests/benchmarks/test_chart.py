"""The chart shows what it is given."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from benchmarks import balance
from benchmarks.chart import Span, chart
from tests.benchmarks.test_balance import step

SVG = "{http://www.w3.org/2000/svg}"


def test_lines_hold_their_value_until_the_next_point() -> None:
    root = ET.fromstring(chart("a < b", "seconds", {"one": [(0, 10), (3, 10), (5, 20)], "two": [(0, 0), (10, 5)]}))
    paths = [each.attrib["d"] for each in root.findall(f"{SVG}path") if "line" in each.attrib["class"]]
    # 0 … 10 seconds are 572 pixels from 52 on, 0 … 20 are 226 pixels from 260 up.
    assert paths == ["M52.0 147.0H338.0V34.0H624.0", "M52.0 260.0H624.0V203.5H624.0"]
    told = [each.text for each in root.findall(f"{SVG}text")]
    assert told[0] == "a < b"
    assert {"one", "two", "seconds", "0", "5", "10", "20"} <= set(told)


def test_a_part_of_the_time_is_shown_behind_the_lines() -> None:
    picture = chart("t", "s", {"one": [(0, 1), (100, 1)]}, [Span(50, 150, "slow")])
    assert re.search(r'<rect class="span" x="338.0" y="34" width="286.0"', picture)  # cut at the end
    assert picture.index("<rect") < picture.index('class="line')


def test_both_kinds_of_pages() -> None:
    assert "prefers-color-scheme:dark" in chart("t", "s", {"one": [(0, 1)]})


@pytest.mark.parametrize("lines", [{}, {"one": []}, {name: [(0, 1)] for name in "abcde"}])
def test_what_cannot_be_shown_is_refused(lines: dict[str, list[tuple[float, float]]]) -> None:
    with pytest.raises(ValueError, match="one to 4 lines"):
        chart("t", "s", lines)


def test_the_shares_of_a_training() -> None:
    picture = balance.picture("disturbed", "local", [step(at) for at in range(120)], began=990.0)
    assert "worker 0 has half of its processor" in picture
    assert picture.count('class="line') == 2  # as many as steps have counts
    assert "(local)" in picture
