"""Workers that faults happen to, as the benchmarks of faults see them from outside: killed, frozen, started again."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from paceline.testing.places import Place
from paceline.testing.processes import Work, end, start

__all__ = ["Victim", "mark_training", "wait_for"]


class Victim:
    """A worker in all its lives. ``work`` is what it does in each; it calls :func:`mark_training` when it trains."""

    def __init__(self, rank: int, place: Place, work: Work, folder: Path) -> None:
        self.rank = rank
        self._place, self._work, self._folder = place, place.enter(rank, work), folder
        self._environment = {**os.environ, **place.environment(rank)}
        self._log = folder / f"worker-{rank}.log"
        self._log.touch()
        self.lives = 0
        self.dead = False
        self.frozen: list[tuple[float, float]] = []
        """From when to when it was, in seconds since 1970."""
        self.begin()

    def begin(self) -> None:
        """Start it, for the first time or again."""
        self.process: BaseProcess = start(self._work, self._environment, self._log)
        self.dead, self.lives = False, self.lives + 1

    def kill(self) -> None:
        """As if its machine had lost its power."""
        end(self.process)
        self.dead = True

    def freeze(self) -> None:
        """It holds everything and does nothing."""
        self.frozen.append((time.time(), math.inf))
        self._place.send(self.rank, self.process, signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        self._place.send(self.rank, self.process, signal.SIGCONT)
        self.frozen[-1] = (self.frozen[-1][0], time.time())

    @property
    def still(self) -> bool:
        """Whether it is frozen now."""
        return bool(self.frozen) and self.frozen[-1][1] == math.inf

    @property
    def trains(self) -> bool:
        """Whether it has come to the loop in this life, and nothing keeps it from going on."""
        return not self.dead and not self.still and _mark(self._folder, self.process.pid or 0).exists()

    @property
    def finished(self) -> bool:
        """Whether it has come to the end by itself."""
        return not self.dead and self.process.exitcode == 0

    def check(self, may_finish: bool = False) -> None:
        """Nobody ends but by what is done to it, or with the training."""
        if not self.dead and self.process.exitcode is not None and not (may_finish and self.finished):
            raise AssertionError(f"worker {self.rank} has ended by itself:\n{self._log.read_text()[-4000:]}")

    def close(self) -> None:
        """Kill it if it still runs."""
        if not self.dead:
            self.kill()


def mark_training(folder: Path) -> None:
    """Say, in a worker, that it trains."""
    _mark(folder, os.getpid()).touch()


def _mark(folder: Path, process: int) -> Path:
    return folder / f"trains-{process}"


def wait_for(done: Callable[[], bool], watched: Sequence[Victim], what: str, seconds: float) -> None:
    """Wait for something, at most so long; nobody of ``watched`` may end meanwhile."""
    limit = time.monotonic() + seconds
    while not done():
        for each in watched:
            each.check()
        if time.monotonic() > limit:
            raise AssertionError(f"waited {seconds:g} s for {what}, in vain")
        time.sleep(0.05)
