"""Start workers that do not need each other: each is started again alone when it fails, and the others go on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from paceline.cli import worker
from paceline.cli.endings import SIGNALS, STOPPED_SECONDS
from paceline.cli.failures import Failure, ending, shell_code
from paceline.cli.launch import FINAL, Machines, environment
from paceline.cli.speak import say
from paceline.errors import SettingError
from paceline.gossip.entrance import VARIABLE

__all__ = ["RESTARTS", "launch_independent", "pause"]

RESTARTS = 3  # of each worker, unless another number is given
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a worker is started again; twice as long every time
HEALTHY = 60.0  # seconds: who has lived so long has not failed at its start, and is started again soon
DONE, STOPPED = "others have come to the end", "all are stopped"
POLL = 0.05  # seconds between two looks at the workers


def pause(before: float | None, lived: float) -> float:
    """Seconds until a worker is started again that has lived so long; ``before`` is the last pause, or None."""
    return FIRST_PAUSE if before is None or lived >= HEALTHY else min(2 * before, LONGEST_PAUSE)


def launch_independent(
    command: Sequence[str], *, workers: int, machines: Machines, restarts: int, invitation: Path | None
) -> int:
    """Run ``script.py ARGS…`` or ``-m module ARGS…`` in every worker; gives the exit code for the shell.

    That is 0 if one worker has come to the end of the script: the others' deaths are what this is for. Otherwise it is
    that of the worker that failed for good first, or 128 and the number of the signal that ended all.
    """
    if workers < 1:
        raise SettingError(f"--workers ({workers}) must be at least 1")
    if restarts < 0:
        raise SettingError(f"--restarts ({restarts}) must be at least 0")
    if machines.count > 1 and invitation is None:
        raise SettingError(
            "--independent on several machines needs --invitation FILE: with the key and the addresses that it holds, "
            "a machine that is started again finds those that live"
        )
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path = Path(folder) / "invitation" if invitation is None else invitation.resolve()
        variables = _environment(workers, machines, path)
        first = machines.rank * workers
        crew = [_Worker(command, {**variables, **_place(first, local)}, restarts) for local in range(workers)]
        return _watch(crew)


def _environment(workers: int, machines: Machines, invitation: Path) -> dict[str, str]:
    host, _, port = (machines.at or f"127.0.0.1:{_free_port()}").rpartition(":")
    kept = {name: value for name, value in environment(workers).items() if not name.startswith("TORCHELASTIC_")}
    return {
        **kept,
        "WORLD_SIZE": str(machines.count * workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "GROUP_RANK": str(machines.rank),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        VARIABLE: str(invitation),
    }


def _place(first: int, local: int) -> dict[str, str]:
    return {"RANK": str(first + local), "LOCAL_RANK": str(local)}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class _Worker:
    """One worker, in as many lives as it may have."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], restarts: int) -> None:
        self._command, self._environment, self._restarts = command, environment, restarts
        self._name = f"rank {environment['RANK']}"
        self._process: subprocess.Popen[bytes] | None = None
        self._began = self._again = 0.0
        self._pause: float | None = None
        self._starts = 0
        self._last = 0
        self.code: int | None = None
        """How it has ended for good."""

    def look(self, now: float, final: str | None) -> None:
        """Start it if it is time to, and see whether it has ended; ``final`` says why it is not started again."""
        if self.code is not None:
            return
        if self._process is None:
            if final is not None and self._starts:
                self._give_up(final)
            elif now >= self._again:
                self._start(now)
            return
        code = self._process.poll()
        if code is not None:
            self.kill()  # what it has started
            self._process = None
            self._ended(code, now, final)

    def _start(self, now: float) -> None:
        words = [sys.executable, worker.__file__, *self._command]
        # With a session of its own, Ctrl-C reaches the launcher alone, which passes it on.
        self._process = subprocess.Popen(words, env=self._environment, start_new_session=True)
        self._began, self._starts = now, self._starts + 1

    def _give_up(self, final: str) -> None:
        """It waits to be started again, and there is nothing left to do for it: it stays as it ended."""
        self.code = self._last
        if final != STOPPED:
            say(f"{self._name} waited to be started again; {final}, so that it is not", "red")

    def _ended(self, code: int, now: float, final: str | None) -> None:
        if code in FINAL or final == STOPPED:
            self.code = code
            return
        told = f"{self._name} {ending(Failure(int(self._environment['RANK']), code, time.time()))}"
        if final is not None:
            self.code = code
            say(f"{told}; {final}, so that it is not started again", "red")
        elif self._starts > self._restarts:
            self.code = code
            say(f"{told}; it is given up after {self._starts} starts, and the others go on", "red")
        else:
            self._pause = pause(self._pause, now - self._began)
            self._again, self._last = now + self._pause, code
            say(f"{told}; starting it again in {self._pause:g} s ({self._starts} of {self._restarts})", "red")

    def stop(self, number: int) -> None:
        """Pass a signal on; who waits to be started is not started any more."""
        if self._process is None:
            self.code = 128 + number if self.code is None else self.code
        elif self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it now, with all that it has started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _watch(crew: list[_Worker]) -> int:
    """Until all have ended for good."""
    first: int | None = None
    with _signals() as got:
        try:
            told, end = 0, float("inf")
            while any(each.code is None for each in crew):
                now = time.monotonic()
                final = DONE if any(each.code == 0 for each in crew) else None
                for each in crew:
                    each.look(now, STOPPED if got else final)
                    first = each.code if first is None and each.code else first
                if got and not told:
                    told, end = 1, now + STOPPED_SECONDS
                    again = "; Ctrl-C again stops at once" if got[0] == signal.SIGINT else ""
                    say(f"stopping all workers ({signal.Signals(got[0]).name}){again}")
                    for each in crew:
                        each.stop(got[0])
                if len(got) > 1 or now > end:
                    break
                time.sleep(POLL)
        finally:
            for each in crew:
                each.kill()
    if got:
        return 128 + got[0]
    return 0 if any(each.code == 0 for each in crew) else shell_code(first or 0)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """While inside, signals to stop are only noted."""
    got: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        got.append(number)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
