"""Bars are as long as what they show."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from benchmarks.bars import Bar, bars, contest
from benchmarks.contestants import HARD

SVG = "{http://www.w3.org/2000/svg}"


def test_bars_are_in_proportion() -> None:
    root = ET.fromstring(bars("a < b", "s", [Bar("one", 50.0, "50 s", 0), Bar("two", 25.0, "half", 1)]))
    assert [float(each.attrib["width"]) for each in root.findall(f"{SVG}rect")] == [390.0, 195.0]  # 0 … 50
    told = [each.text for each in root.findall(f"{SVG}text")]
    assert {"a < b", "one", "50 s", "two", "half", "0", "10", "50"} <= set(told)


def test_who_has_no_value_has_no_bar() -> None:
    root = ET.fromstring(bars("t", "s", [Bar("one", 3.0, "3 s", 0), Bar("two", None, "not reached", 1)]))
    assert len(root.findall(f"{SVG}rect")) == 1
    assert "not reached" in [each.text for each in root.findall(f"{SVG}text")]


@pytest.mark.parametrize("values", [[], [None], [0.0], [1.0, -1.0]])
def test_what_cannot_be_shown_is_refused(values: list[float | None]) -> None:
    with pytest.raises(ValueError, match="a value above 0"):
        bars("t", "s", [Bar("one", value, "", 0) for value in values])


def test_a_contest_shows_ours_peers_and_who_failed() -> None:
    known = {one.name: one for one in HARD}
    shown = [known["ddp"], known["slow-links"], known["hivemind"]]
    found = [{"time_to_target": 60.0, "final_accuracy": 0.9}, {"time_to_target": None, "final_accuracy": 0.875}, {}]
    names = [one.name for one in shown]
    results = {
        "target": 0.9,
        "task": "digits",
        "cluster": "x/hard.toml",
        "contestants": dict(zip(names, found, strict=True)),
    }
    root = ET.fromstring(contest(results, shown))
    texts = {each.text: each.attrib["class"] for each in root.findall(f"{SVG}text") if "class" in each.attrib}
    assert "Seconds to 90% of digits on hard" in texts
    assert (texts["torch DDP"], texts["recipe slow_links"]) == ("c1", "c0")
    assert {"60 s", "not reached: 87.5%", "failed"} <= set(texts)
