"""How workers end: soon, with a chance to say why, and all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from torch.distributed.elastic.multiprocessing import PContext

from paceline.cli.speak import say, screen

__all__ = ["SIGNALS", "prompt_endings", "usual_signals"]

# When one worker has failed, the others of a Paceline run notice within seconds and end with an error that says why.
ALONE_SECONDS = 2.0  # to do that
FAILED_SECONDS = 3  # then, after a SIGTERM, before they are killed
STOPPED_SECONDS = 60  # after Ctrl-C or SIGTERM: to finish the step and to write a checkpoint

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # those that torch's launcher handles


@contextlib.contextmanager
def usual_signals() -> Iterator[None]:
    """Give signals their first meaning until torch handles them, and their present one at the end.

    While torch waits for other machines it cannot react to a Python handler; there are no workers then.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def prompt_endings(ended: set[int]) -> Iterator[None]:
    """While inside, torch ends workers in our way; ``ended`` gets the ids of those that had not ended by themselves.

    Torch waits a fixed 30 s for the others when one has failed (a frozen one never ends), and leaves processes behind
    if a second Ctrl-C comes meanwhile. ``PContext.close`` is the one place where it ends workers.
    """
    close = PContext.close
    closed: set[int] = set()

    def ours(context: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        pids = set(context.pids().values()) - closed
        try:
            if death_sig is None:
                _wait(pids, ALONE_SECONDS)
                ended.update(pid for pid in pids if _runs(pid))
                close(context, signal.SIGTERM, FAILED_SECONDS)
            else:
                _tell_stopping(death_sig, pids)
                close(context, death_sig, STOPPED_SECONDS)
        finally:  # also when a second Ctrl-C interrupts the waiting
            closed.update(pids)
            for pid in pids:  # each worker leads a group of its own, with all that it started
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    PContext.close = ours  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        PContext.close = close  # type: ignore[method-assign]


def _tell_stopping(number: signal.Signals, pids: set[int]) -> None:
    if any(_runs(pid) for pid in pids):
        if screen.is_terminal:
            screen.print()  # behind the ^C and what else is on the line
        again = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
        say(f"stopping all workers ({number.name}){again}")


def _wait(pids: set[int], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(_runs(pid) for pid in pids):
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Whether a child process has not ended; its exit code is left for torch to fetch."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
