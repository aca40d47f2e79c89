"""The launcher, in the process of the test: workers that end well, badly, or not at all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from paceline.cli.launch import Machines, launch
from paceline.errors import SettingError
from paceline.heap import keep_freed
from tests.cli.processes import alive, pids, script


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # launch() sets them for the workers; this lets monkeypatch take them back.
    for name in ("OMP_NUM_THREADS", *keep_freed({})):
        monkeypatch.setenv(name, "1")


def test_every_worker_runs_the_script_with_its_arguments(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    body = "import beside; print(rank, os.environ['WORLD_SIZE'], beside.WORD, __name__, sys.argv[1:])"
    assert launch([script(tmp_path, body), "--lr", "0.1"], workers=2) == 0
    told = capfd.readouterr()
    assert sorted(told.out.splitlines()) == [f"{rank} 2 found __main__ ['--lr', '0.1']" for rank in (0, 1)]
    assert told.err == ""


def test_a_module_runs_as_python_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.py").write_text("import sys; print(__name__, sys.argv)")
    monkeypatch.chdir(tmp_path)
    assert launch(["-m", "job", "-x"], workers=1) == 0
    assert capfd.readouterr().out == f"__main__ ['{tmp_path / 'job.py'}', '-x']\n"


def test_the_first_error_is_told_once_and_frozen_workers_are_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = """
meet(3)
if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
raise ArithmeticError("a bad number")
"""
    assert launch([script(tmp_path, body)], workers=3) == 1
    told = capfd.readouterr().err
    assert told.count("Traceback") == 1
    assert "runpy" not in told
    assert "ranks 1, 2 failed (exit code 1): ArithmeticError: a bad number" in told
    assert "rank 0 still ran, and had to be ended" in told
    assert len(pids(tmp_path)) == 3
    assert not any(map(alive, pids(tmp_path)))


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(3)", 3, "rank 1 ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 killed by SIGKILL"),
    ],
)
def test_the_exit_code_is_that_of_the_worker_that_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], end: str, code: int, words: str
) -> None:
    assert launch([script(tmp_path, f"meet(2)\nif rank == 1:\n    {end}\n")], workers=2) == code
    told = capfd.readouterr().err
    assert words in told
    assert len(told.splitlines()) == 1


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    body = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
(here / "pid-9").write_text(str(child.pid))
sys.exit(1)
"""
    assert launch([script(tmp_path, body)], workers=1) == 1
    assert len(pids(tmp_path)) == 2
    assert not any(map(alive, pids(tmp_path)))


def test_workers_are_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
meet(2)
if rank == 1:
    past = here / "past"
    times = len(past.read_text()) if past.exists() else 0
    past.write_text("x" * (times + 1))
    sys.exit(0 if times == 2 else 5)
"""
    path = script(tmp_path, body)
    assert launch([path], workers=2, restarts=1) == 5
    assert "starting all workers again (1 of 1)" in capfd.readouterr().err
    assert launch([path], workers=2, restarts=1) == 0


def test_a_run_that_was_told_to_stop_is_not_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch([script(tmp_path, "sys.exit(143)")], workers=1, restarts=5) == 128 + signal.SIGTERM
    told = capfd.readouterr().err
    assert "rank 0 stopped by SIGTERM" in told
    assert "again" not in told


def test_cores_are_shared_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.cli.launch.cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS")
    path = script(tmp_path, "print(os.environ['OMP_NUM_THREADS'])")
    assert launch([path], workers=2) == 0
    assert capfd.readouterr().out == "4\n4\n"
    os.environ["OMP_NUM_THREADS"] = "7"
    assert launch([path], workers=1) == 0
    assert capfd.readouterr().out == "7\n"


def test_workers_keep_what_they_have_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    names = list(keep_freed({}))
    path = script(tmp_path, f"print([os.environ.get(name) for name in {names}])")
    for name in names:
        monkeypatch.delenv(name)
    assert launch([path], workers=1) == 0
    assert capfd.readouterr().out == f"{list(keep_freed({}).values())}\n"
    for name in names:
        monkeypatch.delenv(name)
    monkeypatch.setenv(names[0], "1000000")
    assert launch([path], workers=1) == 0
    assert capfd.readouterr().out == "['1000000', None]\n"


def test_settings_that_cannot_be_meant() -> None:
    with pytest.raises(SettingError, match=r"--workers \(0\)"):
        launch(["x"], workers=0)
    with pytest.raises(SettingError, match=r"--restarts \(-1\)"):
        launch(["x"], workers=1, restarts=-1)
    with pytest.raises(SettingError, match="one machine only"):
        launch(["x"], workers=1, restarts=1, machines=Machines(2, 0, "10.0.0.1:29500"))
    with pytest.raises(SettingError, match=r"--nodes \(0\)"):
        Machines(0)
    with pytest.raises(SettingError, match="from 0 to 1"):
        Machines(2, 2, "10.0.0.1:29500")
    with pytest.raises(SettingError, match="has no effect"):
        Machines(1, 0, "10.0.0.1:29500")
    for at in (None, "10.0.0.1", "host:", ":29500", "host:port"):
        with pytest.raises(SettingError, match="HOST:PORT"):
            Machines(2, 0, at)
