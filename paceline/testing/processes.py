"""Processes of workers: quickly started, never outliving their test, reached with all their children."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

__all__ = ["Work", "end", "family", "send", "start"]

# The first optimizer of a process imports torch._dynamo, in more than a second.
PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "paceline.testing", "pytest"]
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
ENDED = "ZX"  # states in which a process is only a line in the table
SECONDS = 10.0  # for killed processes to end


class Work(NamedTuple):
    """What a worker does: call a function, or become a command."""

    job: Callable[..., Any] | None
    args: tuple[Any, ...]
    """Of the function, or the words of the command."""


def start(work: Work, environment: dict[str, str], log: Path) -> BaseProcess:
    """Start a process with a session of its own, whose output goes to a file.

    It is forked from a server that has imported torch, which takes seconds, and done nothing else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process: BaseProcess = context.Process(target=_begin, args=(pickle.dumps(work), environment, log))
    process.start()
    return process


def family(leader: int) -> list[int]:
    """What runs of the session that a process began, itself first, and all descendants wherever they are."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            # A process has any name it likes, in parentheses.
            state, parent, _, session = stat.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if state not in ENDED:
                parents[int(stat.parent.name)] = int(parent)
                if int(session) == leader:
                    found.add(int(stat.parent.name))
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found, key=lambda process: (process != leader, process))


def send(process: BaseProcess, number: signal.Signals) -> set[int]:
    """Send a signal to a process and all that it has started, those that are being forked meanwhile included."""
    assert process.pid is not None
    reached: set[int] = set()
    while new := [one for one in family(process.pid) if one not in reached]:
        for one in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, number)
        reached.update(new)
    return reached


def end(process: BaseProcess) -> None:
    """Kill a process and all that it has started, and wait until they have gone."""
    reached = send(process, signal.SIGKILL)
    process.kill()  # it may not have got to its own session
    limit = time.monotonic() + SECONDS
    process.join(SECONDS)
    while time.monotonic() < limit and any(map(_runs, reached)):
        time.sleep(0.005)
    process.close()


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in ENDED
    except OSError:
        return False


def _begin(call: bytes, environment: dict[str, str], log: Path) -> None:
    os.setsid()
    output, nothing = os.open(log, os.O_WRONLY | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
    for there, here in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(there, here)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    # Only here, where it can be read in the worker's output that a module cannot be imported.
    work: Work = pickle.loads(call)
    if work.job is None:
        _become(work.args)
    _as_in_a_script(work.job, work.args)


def _become(command: tuple[str, ...]) -> NoReturn:
    """Become the command, which ends with the server."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # one of them would keep the server alive without the test
    os.execvp(command[0], command)


def _as_in_a_script(job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Call a function as if it were a script: forked processes would ignore Ctrl-C in the background and ``atexit``."""
    import torch

    threading.Thread(target=_end_with_parent, name="paceline-testing", daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        job(*args)
    except SystemExit:
        raise
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    for process in reversed(family(os.getpid())):  # this one comes last
        os.kill(process, signal.SIGKILL)
