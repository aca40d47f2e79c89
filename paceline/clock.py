"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Clock", "reading"]


def reading() -> float:
    """Seconds on the clock that all of a run's times are taken from."""
    return time.perf_counter()


class Clock:
    """A stopwatch with three hands: loading, computing, exchanging. What is left is the rest of the loop's body."""

    def __init__(self) -> None:
        self.load = self.compute = self.exchange = 0.0
        self.between = 0.0
        """Seconds from the end of the last exchange but one to the end of the last."""
        self.free()

    def free(self) -> None:
        """All workers begin at about the same time: now."""
        self._free = self._mark = reading()

    def start(self) -> None:
        """A step begins."""
        self.load = self.compute = self.exchange = 0.0
        self._mark = reading()

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
        since = reading()
        try:
            yield
        finally:
            away = reading() - since
            self._free += away
            self._mark += away

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While inside, workers exchange what belongs to no step of its own: it lengthens the last exchange."""
        since = reading()
        with self.stopped():
            yield
        away = reading() - since
        self.exchange += away
        self.between += away

    @property
    def busy(self) -> float:
        """Seconds since the last exchange ended that were this worker's own work."""
        return self._mark - self._free - self.exchange

    def _lap(self) -> float:
        before, self._mark = self._mark, reading()
        return self._mark - before
