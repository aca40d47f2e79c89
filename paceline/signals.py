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

_entered: list[Signals] = []
_before: dict[int, Any] = {}


class Signals:
    """While entered, a signal is remembered in ``got``; one that comes a second later, or after, acts as it used to.

    Several may be entered at a time, and left in any order: the handlers from before come back with the last.
    """

    def __init__(self) -> None:
        self.got = 0
        self._since = 0.0

    def __enter__(self) -> Signals:
        self.got = 0
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            if not _entered:
                _before.update({number: signal.signal(number, _take) for number in WATCHED})
            _entered.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self in _entered:
            _entered.remove(self)
            if not _entered:
                _restore()
        if self.got and kind is GeneratorExit:
            # The loop was left before the wish was granted, and nothing can be raised into the user's code from here:
            # the signal comes again, to the handler that it was meant for.
            threading.Timer(0.01, os.kill, (os.getpid(), self.got)).start()

    def take(self, number: int) -> bool:
        """Remember a signal; False if this one was remembered too long ago to mean the same."""
        if not self.got:
            self.got, self._since = number, time.monotonic()
        return time.monotonic() - self._since <= ECHO


def _take(number: int, frame: FrameType | None) -> None:
    same = [one.take(number) for one in _entered]  # all must hear of it
    if not all(same):
        _restore()
        signal.raise_signal(number)


def _restore() -> None:
    for number, handler in _before.items():
        signal.signal(number, handler)
    _before.clear()
