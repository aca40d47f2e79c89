"""``paceline compare``: settings and scripts, one after the other, and what fails loses nobody else."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.compare import SETTINGS
from paceline.compare.contestants import Contestant, Local, compete, of_script, of_setting
from paceline.compare.settings import DEFAULTS
from paceline.errors import SettingError
from tests.cli.processes import LIMIT, alive, paceline, pids, script, until
from tests.lab.needs import needs_lab

FAILS = 'sys.exit("no <b>luck</b>: " + " ".join(sys.argv[1:]))\n'
SLEEPS = "(here / f'ready-{rank}').touch()\ntime.sleep(600)\n"


def test_two_settings_and_a_script_that_fails(tmp_path: Path) -> None:
    bad = f"{Path(script(tmp_path, FAILS)).name} --at {{seed}}"
    words = ["all-reduce", "local-sgd", "--script", bad, "--epochs", "2", "--seeds", "1", "--target", "0.5"]
    process = paceline("compare", *words, "--out", "here", cwd=tmp_path)
    told, _ = process.communicate(timeout=3 * LIMIT)
    assert process.returncode == 1, told
    folder = tmp_path / "here"
    assert {path.name for path in folder.iterdir()} == {"report.html", "all-reduce", "local-sgd", "script-1"}
    lines = {line.split("│")[1].strip(): line for line in told.splitlines() if line.count("│") > 5}
    for name in ("all-reduce", "local-sgd"):
        assert (folder / name / "seed-0" / "events.jsonl").exists(), told
        cells = [cell.strip() for cell in lines[name].split("│")[2:-1]]
        assert float(cells[0].rstrip("%")) > 60  # after two epochs 87 %
        assert cells[1].endswith(" s")
        assert float(cells[3].replace(",", "")) > 0
        assert cells[4].endswith("B")
    assert "failed" in lines[f"script 1: {bad}"]
    here = folder.resolve() / "script-1" / "seed-0"
    assert f"no <b>luck</b>: --at 0 --folder {here}" in (here / "output.txt").read_text()
    report = (folder / "report.html").read_text()
    assert "no &lt;b&gt;luck&lt;/b&gt;" in report
    assert report.count("<figure>") == 3 + 1 + 2 * 3


@needs_lab
@pytest.mark.slow
def test_in_the_lab(tmp_path: Path) -> None:
    words = ["gossip", "by-speed", "--cluster", "uneven", "--seconds", "5", "--seeds", "1", "--out", "here"]
    process = paceline("compare", *words, cwd=tmp_path)
    told, _ = process.communicate(timeout=6 * LIMIT)
    assert process.returncode == 0, told
    for name in ("gossip", "by-speed"):
        assert (tmp_path / "here" / name / "seed-0" / "lab.json").exists()
    assert (tmp_path / "here" / "report.html").read_text().count(">worker 2</text>") == 4


class Bare(Local):
    """One worker without a launcher, which is there at once also on a busy machine."""

    def start(self, command: Sequence[str], folder: Path, limit: float) -> tuple[list[str], float]:
        return [sys.executable, *command], limit


def test_one_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    deaf = script(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPS)
    monkeypatch.setattr("paceline.compare.contestants.PARTING", 1.0)
    began = time.monotonic()
    error = compete(of_script(deaf, 1), 0, Bare(1), tmp_path / "out", 4.0)
    assert error is not None
    assert error.startswith("not ended after 4 s, and stopped")
    assert time.monotonic() - began < 30
    assert [alive(pid) for pid in pids(tmp_path)] == [False]


def test_who_interrupts_twice_leaves_nothing_behind_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    deaf = script(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPS)
    waits = subprocess.Popen.wait
    interrupted: list[float | None] = []

    def interrupt(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return waits(process)
        until(lambda: bool(list(tmp_path.glob("ready-*"))), "the script")
        interrupted.append(timeout)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compete(of_script(deaf, 1), 0, Bare(1), tmp_path / "out", 60.0)
    assert len(interrupted) == 3  # the training, and both signals that it did not hear
    assert [alive(pid) for pid in pids(tmp_path)] == [False]


def test_the_last_words_of_one_that_talks_a_lot(tmp_path: Path) -> None:
    path = tmp_path / "output.txt"
    path.write_text("nothing\n" * 1_000_000 + "\x1b[31mred\x1b[0m\x07 end\n")
    assert Local(1).last_words(tmp_path).splitlines() == ["nothing"] * 5 + ["red end"]


def test_a_report_that_cannot_be_written_does_not_hide_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hindered(contestant: Contestant, *_: object) -> str:
        (tmp_path / "new" / "report.html").mkdir()
        return "not today"

    monkeypatch.setattr("paceline.cli.compare.compete", hindered)
    found = CliRunner().invoke(app, ["compare", "all-reduce", "--seeds", "1", "--out", str(tmp_path / "new")])
    assert found.exit_code == 1
    assert "not today" in found.stdout
    assert "cannot be written" in found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_leaves_nothing_behind_but_the_report(tmp_path: Path, number: signal.Signals) -> None:
    process = paceline("compare", "--script", script(tmp_path, SLEEPS), "--seeds", "1", "--out", "here", cwd=tmp_path)
    until(lambda: len(list(tmp_path.glob("ready-*"))) == 2 or process.poll() is not None, "the workers")
    process.send_signal(number)
    told, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, told
    assert (tmp_path / "here" / "report.html").exists()
    assert not any(map(alive, pids(tmp_path)))


def test_the_report_tells_of_the_trainings_before_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(contestant: Contestant, *_: object) -> str:
        if contestant.label == "local-sgd":
            raise KeyboardInterrupt
        return "not today"

    monkeypatch.setattr("paceline.cli.compare.compete", stopped)
    words = ["compare", "all-reduce", "local-sgd", "--out", str(tmp_path / "new")]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 130
    assert "stopped; the report tells of the trainings before" in found.stderr
    report = (tmp_path / "new" / "report.html").read_text()
    assert "all-reduce" in report
    assert "local-sgd" not in report


def test_every_setting_can_be_made() -> None:
    assert set(DEFAULTS) <= set(SETTINGS)
    for name, make in SETTINGS.items():
        assert {"batch", "sync", "balance", "order", "lr", "micro"} >= set(make())
        assert of_setting(name, "digits", ["--epochs", "1"]).takes_seed


def test_the_words_of_a_script(tmp_path: Path) -> None:
    path = script(tmp_path, "")
    assert of_script(f"{path} --rate '0 1'", 1).command(Path("f"), 3) == [path, "--rate", "0 1", "--folder", "f"]
    own = of_script("-m mine --out={folder}/x --seed {seed}", 2)
    assert own.command(Path("f"), 3) == ["-m", "mine", "--out=f/x", "--seed", "3"]
    assert own.command(Path("f{seed}"), 3) == ["-m", "mine", "--out=f{seed}/x", "--seed", "3"]
    assert (own.label, own.takes_seed) == ("script 2", True)
    for wrong in ("", "-m", "missing.py", "'open"):
        with pytest.raises(SettingError, match=r"--script|no script"):
            of_script(wrong, 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["all-reduc"], "unknown setting: 'all-reduc'; did you mean 'all-reduce'?"),
        (["--task", "digts"], "unknown task: 'digts'; did you mean 'digits'?"),
        (["gossip", "gossip"], "gossip was named more than once"),
        (["--epochs", "1", "--seconds", "1"], "exclude each other"),
        (["--script", "PATH", "--epochs", "1"], "--epochs (1) has no effect on scripts"),
        (["--cluster", "uneven", "-w", "2"], "--workers (2) has no effect with --cluster"),
        (["--cluster", "nowhere"], "nowhere"),
        (["--out", "FULL"], "is not empty, and nothing is resumed; give a new folder"),
        (["--out", "PATH"], "cannot be used"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    monkeypatch.setattr("paceline.cli.compare.compete", lambda *_: pytest.fail("a training was started"))
    places = {"PATH": script(tmp_path, ""), "FULL": str(tmp_path)}
    words = [places.get(word, word) for word in words]
    found = CliRunner().invoke(
        app, ["compare", *words, *([] if "--out" in words else ["--out", str(tmp_path / "new")])]
    )
    assert found.exit_code == 2, found.stderr
    assert told in found.stderr
    assert not (tmp_path / "new").exists()


def test_a_script_that_takes_no_seed_is_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.compare.compete", lambda *_: "not today")
    words = ["compare", "--script", script(tmp_path, ""), "--seeds", "2", "--out", str(tmp_path / "new")]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 1
    assert "its 2 trainings have the same one" in found.stderr
    assert found.stdout.count("not today") == 2
