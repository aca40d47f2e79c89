"""The usual set of recorders."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from paceline.record.console import Console
from paceline.record.json_lines import JsonLines
from paceline.record.tensorboard import TensorBoard
from paceline.record.trace import Trace
from paceline.roles import Recorder

__all__ = ["folder"]


def folder(path: str | os.PathLike[str], *, shown: bool = True) -> list[Recorder]:
    """Recorders that keep everything in one folder, and a display on the console if it is to be ``shown``.

    ``events.jsonl`` (:class:`JsonLines`), ``trace.json`` (:class:`Trace`) and ``tensorboard/`` (:class:`TensorBoard`,
    if it is installed; the console says so if not). A folder that holds an earlier run is continued.
    """
    path = Path(path)
    consoles = [Console()] if shown else []
    recorders: list[Recorder] = [JsonLines(path / "events.jsonl"), Trace(path / "trace.json")]
    if importlib.util.find_spec("tensorboard") is not None:
        recorders.append(TensorBoard(path / "tensorboard"))
    else:
        for console in consoles:
            console.say("no TensorBoard files: for them, run: pip install 'paceline[tensorboard]'")
    return [*recorders, *consoles]
