"""Who takes part, and how one training of a contestant is started, waited for and ended."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.compare.settings import SETTINGS
from paceline.errors import SettingError
from paceline.lab.report import Report
from paceline.lab.runner import TIMED_OUT
from paceline.tasks.task import choose

__all__ = ["Contestant", "InLab", "Local", "compete", "of_script", "of_setting"]

BUILDING = 60.0  # seconds for the lab to build its network, and to take it down
PARTING = 15.0  # seconds for a launcher to end its workers when it is told to
LINES, LONGEST = 6, 2000  # of what a training has said last, in lines and letters
OUTPUT = "output.txt"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # what a terminal would obey


@dataclass(frozen=True)
class Contestant:
    """A setting or a script under its name."""

    label: str
    """Short: it stands in pictures."""
    title: str
    words: tuple[str, ...]
    """``script.py ARGS…`` or ``-m module ARGS…``; ``{folder}`` and ``{seed}`` stand for those of a training."""

    @property
    def takes_seed(self) -> bool:
        """Whether anything depends on the seed."""
        return any("{seed}" in word for word in self.words)

    def command(self, folder: Path, seed: int) -> list[str]:
        """The words of one training."""
        told = {"{folder}": str(folder), "{seed}": str(seed)}
        # In one pass: the folder's own name may have braces.
        return [re.sub(r"\{folder\}|\{seed\}", lambda found: told[found[0]], word) for word in self.words]


def of_setting(name: str, task: str, length: Sequence[str]) -> Contestant:
    """A built-in setting; ``length`` is ``--epochs N`` or ``--seconds S``."""
    choose("setting", name, SETTINGS)
    words = ("-m", "paceline.compare.train", "--setting", name, "--task", task, *length)
    return Contestant(name, name, (*words, "--seed", "{seed}", "--folder", "{folder}"))


def of_script(text: str, number: int) -> Contestant:
    """A user's own script with its arguments; ``--folder`` is added if they do not say where the folder goes."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise SettingError(f"--script {text!r} cannot be read ({error}); write it as in a shell") from None
    if not words or words == ("-m",):
        raise SettingError(f"--script {text!r} names no script; give the path of a Python file, or -m and a module")
    if words[0] != "-m" and not Path(words[0]).is_file():
        raise SettingError(f"there is no script {words[0]}; give the path of a Python file, or -m and a module")
    if not any("{folder}" in word for word in words):
        words += ("--folder", "{folder}")
    return Contestant(f"script {number}", f"script {number}: {text}", words)


@dataclass(frozen=True)
class Local:
    """Workers of this machine."""

    workers: int

    def start(self, command: Sequence[str], folder: Path, limit: float) -> tuple[list[str], float]:
        """What to run, and how many seconds it may take."""
        return [sys.executable, "-m", "paceline", "run", "--workers", str(self.workers), *command], limit

    def last_words(self, folder: Path) -> str:
        """What the training has said at its end."""
        return _tail(folder / OUTPUT)


@dataclass(frozen=True)
class InLab:
    """The workers of a cluster in the lab."""

    cluster: str

    def start(self, command: Sequence[str], folder: Path, limit: float) -> tuple[list[str], float]:
        """What to run, and how many seconds it may take: the lab keeps the limit by itself."""
        options = [self.cluster, "--out", str(folder), "--limit", str(limit)]
        return [sys.executable, "-m", "paceline", "lab", "run", *options, "--", sys.executable, *command], (
            limit + BUILDING
        )

    def last_words(self, folder: Path) -> str:
        """What the worker that failed first by itself has said at its end, or else the lab."""
        path = folder / "lab.json"
        workers = msgspec.json.decode(path.read_bytes(), type=Report).workers if path.exists() else []
        failed = [worker for worker in workers if worker.exit and worker.ended_by is None]
        if not failed:
            return _tail(folder / OUTPUT)
        first = min(failed, key=lambda worker: worker.started + worker.wall_seconds)
        return f"{first.name}: {_tail(folder / f'{first.name}.log')}"


def compete(contestant: Contestant, seed: int, place: Local | InLab, folder: Path, limit: float) -> str | None:
    """Let a contestant train, into a new folder; gives what went wrong, or None.

    None of its workers is left after ``limit`` seconds, or when this is interrupted, however often. What these have
    started in sessions of their own is theirs to end.
    """
    folder.mkdir(parents=True)
    words, seconds = place.start(contestant.command(folder, seed), folder, limit)
    with (folder / OUTPUT).open("w") as output:
        # A session of its own: Ctrl-C is for us, and all of it can be ended at once.
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = TIMED_OUT
        finally:
            _end(process)
    if code == 0:
        return None
    what = f"not ended after {limit:g} s, and stopped" if code == TIMED_OUT else f"exit code {code}"
    return f"{what}: {place.last_words(folder)}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher with its workers: in order, at once at the second signal, and for certain.

    Who interrupts that is in a hurry: it goes on with the next signal.
    """
    impatient = False
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PARTING / 2)
            except subprocess.TimeoutExpired:
                pass
            except KeyboardInterrupt:
                impatient = True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if impatient:
        raise KeyboardInterrupt


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:  # it may be gigabytes
        file.seek(max(0, path.stat().st_size - 4 * LONGEST))
        text = CONTROL.sub("", file.read(4 * LONGEST).decode(errors="replace"))
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-LINES:])[-LONGEST:]
