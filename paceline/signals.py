"""Ctrl-C and SIGTERM as a wish to stop, which all workers grant together after the same step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Signals"]

WATCHED = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """While entered, the first signal is remembered in ``got``; a second one of the same kind acts as it used to."""

    def __init__(self) -> None:
        self.got = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {number: signal.signal(number, self._take) for number in WATCHED}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.got = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
