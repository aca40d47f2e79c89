"""The documents are true: their Python runs, their links lead somewhere, their commands exist."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer

from paceline.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PROGRAMS = {"cd", "git", "make", "paceline", "pip", "python", "tensorboard", "torchrun"}


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    language: str
    text: str
    line: int
    """The line of the page where the text begins, from 1."""


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text()
    found = (Block(m[1], m[2], text.count("\n", 0, m.start(2)) + 1) for m in BLOCK.finditer(text))
    return [block for block in found if block.language == language]


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module to run blocks in, in a folder of its own; the random state of the tests is left as it is."""
    monkeypatch.chdir(tmp_path)
    page = ModuleType("page")  # dataclasses look up the module of a class
    monkeypatch.setitem(sys.modules, "page", page)
    with torch.random.fork_rng(devices=[]):
        yield page


def execute(text: str, page: Path, line: int, module: ModuleType) -> None:
    # The empty lines make a traceback name the line of the page.
    exec(compile("\n" * (line - 1) + text, str(page), "exec"), module.__dict__)


RUNNABLE = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", RUNNABLE, ids=names(RUNNABLE))
def test_python_blocks_run(page: Path, module: ModuleType) -> None:
    for block in blocks(page, "python"):
        execute(block.text, page, block.line, module)


def test_there_is_something_to_run() -> None:
    assert {"README.md", "docs/loop.md", "docs/roles.md"} <= set(names(RUNNABLE))


def side(diff: str, drop: str) -> str:
    """One side of a diff: the lines without ``drop`` at their beginning, and without the mark."""
    lines = [line for line in diff.splitlines(keepends=True) if not line.startswith(drop)]
    assert all(line[0] in " +-\n" for line in lines), diff
    return "".join(line[1:] if line != "\n" else line for line in lines)


@pytest.mark.parametrize("drop", ["+", "-"], ids=["before", "after"])
def test_both_sides_of_the_diff_in_the_readme_run(drop: str, module: ModuleType) -> None:
    readme = ROOT / "README.md"
    (diff,) = blocks(readme, "diff")
    for block in blocks(readme, "python")[:1]:
        execute(block.text, readme, block.line, module)
    execute(side(diff.text, drop), readme, diff.line, module)


def test_the_example_of_the_readme_is_short() -> None:
    first = blocks(ROOT / "README.md", "python")[0]
    assert len(first.text.strip().splitlines()) <= 20


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_only_fences_that_are_looked_at(page: Path) -> None:
    """A misspelt language would take a block out of the tests; an unclosed fence would take several."""
    fences = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)
    assert len(fences) % 2 == 0
    assert set(fences[::2]) <= {"python", "sh", "text", "toml", "diff"}
    assert set(fences[1::2]) <= {""}


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(BLOCK.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert target.is_relative_to(ROOT), f"{page.name} links out of the project: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}"


def test_the_readme_links_to_every_page() -> None:
    linked = {(ROOT / link).resolve() for link in LINK.findall((ROOT / "README.md").read_text())}
    assert set(PAGES) - {ROOT / "README.md"} <= linked


def test_promises_name_tests_that_are_there() -> None:
    links = re.findall(r"\[(test_\w+)\]\(([^)]+)\)", (ROOT / "docs/promises.md").read_text())
    assert len(links) > 40
    for name, path in links:
        assert f"def {name}(" in (ROOT / "docs" / path).read_text(), f"{path} has no {name}"


def commands(page: Path) -> Iterator[list[str]]:
    for block in blocks(page, "sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words[3:] if words[:2] == ["sudo", "env"] else words


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for program, *args in commands(page):
        told = f"{page.name}: {shlex.join([program, *args])}"
        assert program in PROGRAMS, told
        if program == "make":
            assert set(args) <= targets, told
        if program == "paceline":
            check_paceline(args, told)
        for path in (arg for arg in args if arg.startswith(("examples/", "tests/", "benchmarks/"))):
            assert (ROOT / path).exists(), told


def check_paceline(args: list[str], told: str) -> None:
    """The subcommand and those options of it that stand before its first argument exist."""
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert args[0] in known, told
    while hasattr(known[args[0]], "commands"):
        known, args = known[args[0]].commands, args[1:]
        assert args[0] in known, told
    options = {option: one for one in known[args[0]].params for option in one.opts if option.startswith("-")}
    rest = iter(args[1:])
    for word in rest:
        if not word.startswith("-"):
            return
        if word not in ("-h", "--help"):
            assert word in options, told
            if not options[word].is_flag:
                next(rest)


def test_documents_speak_of_the_project_alone() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        found = re.search(r"(?<![\w.])/(work|tmp|home|root)/", page.read_text())
        assert not found, f"{page.name} names a path of one machine: {found}"
