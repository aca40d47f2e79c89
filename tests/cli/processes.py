"""Scripts for workers, commands as a person types them, and whether a process is still there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
LIMIT = 120.0  # seconds: a hang is a failed test, not a stuck suite

# Every worker leaves its process id, so that a test can look for it even if its parent is gone.
HEAD = """
import os, signal, sys, time
from pathlib import Path
here, rank = Path(__file__).parent, int(os.environ["RANK"])
(here / f"part-{rank}").write_text(str(os.getpid()))
(here / f"part-{rank}").rename(here / f"pid-{rank}")
def meet(count):
    while len(list(here.glob("pid-*"))) < count:
        time.sleep(0.01)
"""


def script(folder: Path, body: str) -> str:
    """A script for workers, which need no torch: that would cost each of them seconds."""
    path = folder / "script.py"
    path.write_text(HEAD + body)
    return str(path)


def paceline(*args: str, cwd: Path) -> subprocess.Popen[str]:
    """The command, from the source tree, installed or not."""
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(cwd)},  # a killed launcher leaves its temporary files
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("pid-*"))]


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def until(true: Callable[[], bool], what: str) -> None:
    """Wait for something that comes soon."""
    end = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < end, f"waited {LIMIT} s for {what}"
        time.sleep(0.02)


DEAF = """
signal.signal(signal.SIGINT, lambda *_: (here / f"asked-{rank}").touch())
(here / f"ready-{rank}").touch()
while True:
    time.sleep(0.01)
"""


def stopped_twice(*args: str, folder: Path) -> str:
    """What a launcher says of two workers that do not listen when Ctrl-C is pressed, and pressed again."""
    process = paceline(*args, script(folder, DEAF), cwd=folder)
    until(lambda: len(list(folder.glob("ready-*"))) == 2 or process.poll() is not None, "the workers")
    process.send_signal(signal.SIGINT)
    until(lambda: len(list(folder.glob("asked-*"))) == 2 or process.poll() is not None, "the signal")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    return told
