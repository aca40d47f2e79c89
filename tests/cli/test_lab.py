"""``paceline lab``: what it says, with and without the right to build anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.lab.remains import remains
from tests.lab.needs import needs_lab


def lab(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["lab", *words], env={"COLUMNS": "200"})
    return found.exit_code, found.output


@needs_lab
def test_run_shows_labelled_output_and_a_table(tmp_path: Path) -> None:
    code, said = lab("run", "even", "--out", str(tmp_path / "out"), "--", "sh", "-c", "echo I am $RANK")
    assert code == 0
    assert "w0 | I am 0\n" in said
    assert "w1 | I am 1\n" in said
    assert "received MB" in said
    assert (tmp_path / "out" / "lab.json").exists()
    assert (tmp_path / "out" / "w1.log").read_text() == "I am 1\n"


@needs_lab
def test_the_exit_code_is_the_workers(tmp_path: Path) -> None:
    assert lab("run", "even", "--", "sh", "-c", "exit 7")[0] == 7
    assert lab("run", "even", "--limit", "0.3", "--", "sleep", "60")[0] == 124


@needs_lab
def test_check_measures_every_processor_and_link(tmp_path: Path) -> None:
    file = tmp_path / "odd.toml"
    file.write_text("""
[[site]]
name = "here"
up = "3mbit"
down = "6mbit"
[[worker]]
cpu = 0.3
up = "10mbit"
down = "40mbit"
site = "here"
""")
    _, said = lab("check", str(file))
    rows = [line.split() for line in said.splitlines() if "core" in line or "Mbit/s" in line]
    assert [(row[0], row[1]) for row in rows] == [
        ("w0", "cpu"),
        ("w0", "up"),
        ("w0", "down"),
        ("here", "up"),
        ("here", "down"),
    ]
    # Whatever else the machine does, no link is faster than its limit by more than its bucket, and the order holds.
    rates = {(row[0], row[1]): float(row[3]) for row in rows[1:]}
    assert rates["here", "up"] < rates["here", "down"] < rates["w0", "up"] < rates["w0", "down"] < 44


@needs_lab
def test_clean_without_remains() -> None:
    code, said = lab("clean")
    assert code == 0
    assert "nothing is left of any lab" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "quick", "--", "true"], "there is no cluster file 'quick', and no example of that name"),
        (["run", "even", "--", "no-such-command"], "the command 'no-such-command' does not exist"),
        (["check", "quick"], "there is no cluster file 'quick'"),
    ],
)
def test_wrong_words(words: list[str], says: str) -> None:
    code, said = lab(*words)
    assert code == 2
    assert says in said


@needs_lab
def test_a_wrong_file_builds_nothing(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("[[worker]]\nrate = '1mbit'\ncpu = 99.0\n")
    code, said = lab("run", str(file), "--", "true")
    assert code == 2
    assert "bad.toml: the workers need 99 cores together" in said
    assert remains() == []


@pytest.mark.parametrize("words", [["run", "even", "--", "true"], ["check", "even"], ["clean"]])
def test_without_root_it_says_what_is_missing(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name, path=None: None if name == "tc" else f"/usr/bin/{name}")
    code, said = lab(*words)
    assert code == 1
    assert "the lab cannot work on this machine:" in said
    assert "- tc is not installed: install iproute2 (Debian: apt-get install iproute2)" in said
    assert "- it must be run as root, to make network namespaces and cgroups: use sudo" in said
