"""The table and the report: what they say, and how the report looks in a real browser."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from paceline.compare import Row, Trial, cells, page, rows, terminal_table
from paceline.compare.style import COLOURS
from tests.compare.browser import Browser, needs_chromium
from tests.compare.fake import NASTY, many, row, trial

FACTS = {"task": NASTY, "versions": "paceline 0.1"}


class Tags(HTMLParser):
    """Counts tags, and sees that all are closed in order."""

    VOID = ("meta", "link", "path", "rect", "circle")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_means_and_spreads() -> None:
    trials = (trial("one"), trial("one", 1, speed=2.0))
    found = cells(Row("one", "one", trials), 0.9)
    assert found == ["99.7% (99.6%…99.8%)", "0.45 s", "1.35 (0.90…1.80)", "4,800", "500.0 kB", "30%", "80%"]


def test_a_target_that_only_some_reach() -> None:
    good, missed = trial("one"), Trial("one", 1, trial("one").points[:1], trial("one").workers)
    assert cells(Row("one", "one", (good, missed)), 0.9)[1] == "0.60 s (1 of 2)"  # type: ignore[index]
    assert cells(Row("one", "one", (missed,)), 0.9)[1] == "not reached"  # type: ignore[index]
    assert cells(Row("one", "one", (missed,)), None)[1] == "–"  # type: ignore[index]


def test_one_that_failed_does_not_hide_the_others() -> None:
    found = rows({"a": "a", "b": "b [red]", "c": "c"}, [trial("a"), Trial("b", 0, error="[boom] it broke")])
    assert [each.label for each in found] == ["a", "b"]  # c was not reached
    screen = Console(width=150, file=io.StringIO())
    with screen.capture() as captured:
        screen.print(terminal_table(found, 0.9))
    told = captured.get()
    assert "99.6%" in told
    assert re.search(r"b \[red\] +│ +failed", told)
    assert "failed: b [red], seed 0: [boom] it broke" in told


def test_all_text_is_escaped_and_all_tags_are_closed() -> None:
    text = page(NASTY, FACTS, many(), 0.9)
    tags = Tags(text)
    assert not {"script", "b", "img", "iframe"} & set(tags.seen)
    assert NASTY in "".join(tags.text)
    assert "1 of 2 failed" in text


def test_nothing_comes_from_elsewhere() -> None:
    text = page("t", FACTS, many(), 0.9)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\b(src|on\w+)=", text.replace(NASTY, ""))
    assert "default-src 'none'" in text


def test_ids_are_unique() -> None:
    found = re.findall(r' id="([^"]+)"', page("t", FACTS, many()))
    assert len(found) == len(set(found)) > 20


def test_only_failures_are_a_report_too() -> None:
    text = page("t", {}, [Row("a", "a", (Trial("a", 0, error="broken"),))], 0.9)
    assert "<pre>seed 0: broken</pre>" in text
    assert "<h2>Accuracy" not in text
    Tags(text)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_colours_stand_out_from_the_page(dark: bool) -> None:
    ground = luminance("#14171b" if dark else "#ffffff")
    for pair in COLOURS:
        low, high = sorted((luminance(pair[dark]), ground))
        assert (high + 0.05) / (low + 0.05) >= 4.5, pair[dark]  # WCAG 2.1, AA


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_in_a_real_browser(tmp_path: Path, browser: Browser, scheme: str, width: int) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(NASTY, FACTS, many(), 0.9), encoding="utf-8")
    browser.open(file, width=width, scheme=scheme)
    assert browser.complaints() == []
    assert browser.requests() == []
    assert browser.ask("document.title") == NASTY
    assert browser.ask("document.documentElement.scrollWidth") <= width
    ground = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")
    # Every picture is as wide as its place allows, and its letters can still be read.
    assert browser.ask("[...document.querySelectorAll('figure svg')].every(s => s.getBoundingClientRect().width > 300)")
    names = "[...document.querySelectorAll('.name')]"
    assert browser.ask(f"{names}.every(t => t.getBBox().x + t.getBBox().width <= 440)")  # none is cut off


@needs_chromium
def test_the_browser_would_notice(tmp_path: Path, browser: Browser) -> None:
    file = tmp_path / "bad.html"
    file.write_text("<img src='http://127.0.0.1:9/a.png'><script>console.error('no')</script><p style='width:999px'>")
    browser.open(file, width=390, scheme="light")
    assert any('"no"' in line for line in browser.complaints())
    assert browser.requests() == ["http://127.0.0.1:9/a.png"]
    assert browser.ask("document.documentElement.scrollWidth") > 390


def test_a_row_without_a_title_has_its_label() -> None:
    assert row("one").name == "one"
