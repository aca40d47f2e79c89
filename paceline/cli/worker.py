"""What runs first in every worker: the user's script, as Python itself would run it, and around it three things.

The worker ends when its launcher does. Its error is kept for the launcher, which sums up those of all workers. And of
many workers with errors only the first shows its traceback, at once and in one piece, instead of all in a tangle.

This file is run by its path and uses the standard library alone, so that nothing is imported before the script.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from types import TracebackType

__all__ = ["main"]

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
CONSEQUENCES = ("WorkerLost",)  # errors that only tell of another worker's


def main() -> None:
    """Run ``script.py ARGS…`` or ``-m module ARGS…``."""
    _end_with_launcher()
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):  # shown at once, and lines of several workers stay whole
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    sys.excepthook = _take_error
    try:
        _run(sys.argv[1:])
    except SystemExit as end:
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if path and end.code:  # when it was decides which worker was the first; the others' errors may follow from it
            with contextlib.suppress(OSError):
                _keep(path, type(end), end, "")
        raise


def _run(target: list[str]) -> None:
    if target[0] == "-m":
        sys.argv, sys.path[0] = target[1:], os.getcwd()
        runpy.run_module(target[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = target, os.path.dirname(os.path.realpath(target[0]))
        runpy.run_path(target[0], run_name="__main__")


def _end_with_launcher() -> None:
    """Be killed when the launcher is: a worker has a session of its own, so nobody else would end it.

    No softer signal will do: the workers' meeting place has gone with the launcher, so they cannot stop together.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):  # Linux
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _take_error(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return  # the launcher says that all workers were stopped
    while at is not None and at.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        at = at.tb_next
    text = "".join(traceback.format_exception(kind, error, at))
    shows = True
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with contextlib.suppress(OSError):  # a full disk
            _keep(path, kind, error, text)
            shows = _is_first(path, kind)
    if shows:
        sys.stderr.write(text)


def _keep(path: str, kind: type[BaseException], error: BaseException, text: str) -> None:
    """Write the error to the file that torch's launcher reads, in the form that it expects."""
    details = {"py_callstack": text, "timestamp": time.time()}
    part = f"{path}.part"
    with open(part, "w") as file:
        json.dump({"message": {"message": f"{kind.__name__}: {error}", "extraInfo": details}}, file)
    os.replace(part, path)


def _is_first(path: str, kind: type[BaseException]) -> bool:
    """Whether no other worker of this machine has shown an error in this attempt."""
    if kind.__name__ in CONSEQUENCES:
        return False
    attempt = os.path.dirname(os.path.dirname(path))
    try:
        os.close(os.open(os.path.join(attempt, "shown"), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    main()
