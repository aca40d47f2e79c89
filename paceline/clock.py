"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Clock"]


class Clock:
    """A stopwatch with three hands: loading, computing, exchanging. What is left is the rest of the loop's body."""

    def __init__(self) -> None:
        self.load = self.compute = self.exchange = 0.0
        self.between = 0.0
        """Seconds from the end of the last exchange but one to the end of the last."""
        self.free()

    def free(self) -> None:
        """All workers begin at about the same time: now."""
        self._free = self._mark = time.perf_counter()

    def start(self) -> None:
        """A step begins."""
        self.load = self.compute = self.exchange = 0.0
        self._mark = time.perf_counter()

    def loaded(self) -> None:
        """Data has come."""
        self.load += self._lap()

    def computed(self, of_which_exchange: float = 0.0) -> None:
        """A piece of the loop's body has run; some of it may have been communication."""
        self.compute += self._lap() - of_which_exchange
        self.exchange += of_which_exchange

    def exchanged(self) -> None:
        """The exchange is over: all workers are free again at about the same time."""
        self.exchange += self._lap()
        self.between, self._free = self._mark - self._free, self._mark

    def exchanged_more(self) -> None:
        """One more exchange of the same step is over: it lengthens the first one."""
        lap = self._lap()
        self.exchange += lap
        self.between += lap
        self._free = self._mark

    def rested(self) -> None:
        """Something else in the loop's body has run: the optimizer, say."""
        self._lap()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """While inside, the time is nobody's: a checkpoint or an evaluation that all workers come to."""
        since = time.perf_counter()
        try:
            yield
        finally:
            away = time.perf_counter() - since
            self._free += away
            self._mark += away

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While inside, workers exchange what belongs to no step of its own: it lengthens the last exchange."""
        since = time.perf_counter()
        with self.stopped():
            yield
        away = time.perf_counter() - since
        self.exchange += away
        self.between += away

    @property
    def busy(self) -> float:
        """Seconds since the last exchange ended that were this worker's own work."""
        return self._mark - self._free - self.exchange

    def _lap(self) -> float:
        now = time.perf_counter()
        lap, self._mark = now - self._mark, now
        return lap
