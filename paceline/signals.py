"""Ctrl-C and SIGTERM as a wish to stop, which all workers grant together after the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Signals"]

WATCHED = (signal.SIGINT, signal.SIGTERM)
ECHO = 1.0
"""Seconds in which more signals count as the same: a launcher passes on what a terminal or scheduler sent to all."""


class Signals:
    """While entered, a signal is remembered in ``got``; one that comes a second later, or after, acts as it used to."""

    def __init__(self) -> None:
        self.got = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self.got = 0
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {number: signal.signal(number, self._take) for number in WATCHED}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()
        if self.got and kind is GeneratorExit:
            # The loop was left before the wish was granted, and nothing can be raised into the user's code from here:
            # the signal comes again, to the handler that it was meant for.
            threading.Timer(0.01, os.kill, (os.getpid(), self.got)).start()

    def _take(self, number: int, frame: FrameType | None) -> None:
        if not self.got:
            self.got, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > ECHO:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
