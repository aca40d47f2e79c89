"""Call a function in a process that was started by a command."""

from __future__ import annotations

import base64
import pickle
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["command", "main"]

CODE = "import sys; sys.path[:0] = {path}; from paceline.testing.function import main; main()"


def command(job: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, ...]:
    """The command that calls a function of a module.

    Function and arguments go in the form in which ``multiprocessing`` sends them: a function by its name.
    """
    call = base64.b64encode(pickle.dumps((job, args))).decode()
    return sys.executable, "-c", CODE.format(path=sys.path), call


def main() -> None:
    """Call it: what is unpickled was written by the process that made the command."""
    job, args = pickle.loads(base64.b64decode(sys.argv[1]))
    job(*args)
