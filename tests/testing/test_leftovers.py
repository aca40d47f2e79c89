"""Nothing is left of a group, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from paceline.testing import Workers
from paceline.testing.processes import Work, start
from tests.testing import jobs

ROOT = Path(__file__).parents[2]
LIMIT = 60.0  # seconds: a hang is a failed test, not a stuck suite


def numbers(folder: Path, workers: int) -> list[int]:
    """The processes of workers that hang, as soon as all have left their numbers."""
    end = time.monotonic() + LIMIT
    while len(files := list(folder.glob("numbers-*"))) < workers:
        assert time.monotonic() < end, f"only {files} after {LIMIT:g} s"
        time.sleep(0.02)
    return [int(number) for file in files for number in file.read_text().split()]


def alive(number: int) -> bool:
    try:
        return bool(psutil.Process(number).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_hang_is_an_error_and_ends_with_all_children(workers: Workers, tmp_path: Path) -> None:
    group = workers(jobs.hang, tmp_path, size=2)
    group.at(step=7, worker=1).kill()
    group.start()
    processes = numbers(tmp_path, 2)
    assert len(processes) == 6
    assert all(map(alive, processes))
    with pytest.raises(AssertionError) as caught:
        group.wait(0.5)
    assert not any(map(alive, processes))
    message = str(caught.value)
    assert message.startswith(
        "workers 0, 1 had not ended after 0.5 s; these faults have not happened: kill worker 1 at"
    )
    assert "--- worker 1 wrote:\nhangs" in message


def test_workers_that_nobody_waits_for_end_with_the_test(tmp_path: Path) -> None:
    starter = Workers(lambda: tmp_path)
    starter(jobs.hang, tmp_path, size=1).start()
    processes = numbers(tmp_path, 1)
    starter.close()
    assert not any(map(alive, processes))


def test_a_group_of_which_only_a_part_could_be_started_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[BaseProcess] = []

    def only_one(work: Work, environment: dict[str, str], log: Path) -> BaseProcess:
        if started:
            raise OSError("no more processes")
        started.append(start(work, environment, log))
        return started[0]

    monkeypatch.setattr("paceline.testing.course.start", only_one)
    with pytest.raises(OSError, match="no more processes"):
        Workers(lambda: tmp_path)(jobs.hang, tmp_path, size=2).start()
    with pytest.raises(ValueError, match="process object is closed"):
        started[0].is_alive()  # it has ended, and is no longer known


SCRIPT = """
import sys, time
from pathlib import Path
from paceline.testing import Workers
from tests.testing import jobs

folder = Path(sys.argv[1])
starter = Workers(lambda: folder)
starter(jobs.hang, folder, size=1).start()
command = f"echo $$ > {folder}/part && mv {folder}/part {folder}/numbers-command && exec sleep 600"
starter(["sh", "-c", command], size=1).start()
time.sleep(600)
"""


def test_workers_end_when_the_test_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment) as tester:
        processes = numbers(tmp_path, 2)
        assert len(processes) == 4
        tester.send_signal(signal.SIGKILL)
    end = time.monotonic() + LIMIT
    while any(map(alive, processes)):
        assert time.monotonic() < end, [number for number in processes if alive(number)]
        time.sleep(0.02)
