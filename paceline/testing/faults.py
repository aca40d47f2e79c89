"""What happens to which worker at which step."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import SettingError
from paceline.lab import Cluster, Event, Link
from paceline.lab.cluster import parse_rate

__all__ = ["At", "Deed", "Fault", "Moment"]

Deed = signal.Signals | Event | None
"""A signal to all processes of a worker, a change of the lab, or nothing."""


@dataclass(frozen=True)
class Moment:
    """When a fault happens: as a worker comes to a stage of a step, or so many seconds after it has gone on from it."""

    worker: int
    step: int
    stage: str
    delay: float

    @property
    def key(self) -> tuple[int, int, str]:
        """What a worker tells of it."""
        return self.worker, self.step, self.stage

    def __str__(self) -> str:
        after = f"{self.delay:g} s after " if self.delay else "at "
        return f"worker {self.worker} {after}step {self.step} ({self.stage})"


@dataclass(frozen=True)
class Fault:
    """A deed, when it is done, and what undoes it ``seconds`` later."""

    what: str
    moment: Moment
    do: Deed
    undo: Deed = None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.what} {self.moment}"


class At:
    """A moment that ``group.at`` was given: one call says what happens then, to the worker and all its processes."""

    def __init__(self, moment: Moment, cluster: Cluster | None, take: Callable[[Fault], None]) -> None:
        self.moment = moment
        self._cluster, self._take = cluster, take

    def kill(self) -> None:
        """SIGKILL: as if its machine had lost its power."""
        self._take(Fault("kill", self.moment, signal.SIGKILL))

    def freeze(self, seconds: float | None = None) -> None:
        """SIGSTOP: it holds everything and does nothing; for ``seconds``, or for ever."""
        self._take(Fault("freeze", self.moment, signal.SIGSTOP, signal.SIGCONT, _duration(seconds)))

    def signal(self, number: signal.Signals) -> None:
        """Any other signal, such as the SIGTERM of a scheduler."""
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise SettingError(f"{signal.Signals(number).name} is what .kill() or .freeze() do; write one of them")
        self._take(Fault(f"send {signal.Signals(number).name} to", self.moment, signal.Signals(number)))

    def cut(self, seconds: float | None = None) -> None:
        """Lose everything that its network link carries, without a word; for ``seconds``, or for ever (lab only)."""
        name = self._in_lab("cut").workers[self.moment.worker].name
        cut, restore = Event(0, name, "cut"), Event(0, name, "restore")
        self._take(Fault("cut", self.moment, cut, restore, _duration(seconds)))

    def throttle(self, *, cpu: float | None = None, rate: str | None = None) -> None:
        """Leave it so many cores (or a fraction of one), and such a link: ``rate="10mbit"`` (lab only)."""
        worker = self._in_lab("throttle").workers[self.moment.worker]
        if cpu is None and rate is None:
            raise SettingError("throttle needs cpu (cores), rate (such as '10mbit'), or both")
        if cpu is not None and not 0.02 <= cpu < worker.cpu:
            raise SettingError(
                f"throttle(cpu={cpu:g}) must be at least 0.02 and below what worker {worker.rank} has: {worker.cpu:g}"
            )
        bits = None if rate is None else parse_rate(rate)
        if bits is not None and not bits < max(worker.link.up, worker.link.down):
            raise SettingError(f"throttle(rate={rate!r}) is no less than what worker {worker.rank} has")
        link = None if bits is None else Link(min(bits, worker.link.up), min(bits, worker.link.down))
        self._take(Fault("throttle", self.moment, Event(0, worker.name, "set", cpu, link)))

    def mark(self) -> None:
        """Nothing: the worker's own code is at fault then (it raises, its loss is NaN), and the time is taken."""
        self._take(Fault("mark", self.moment, None))

    def _in_lab(self, what: str) -> Cluster:
        if self._cluster is None:
            raise SettingError(
                f".{what}() needs links and processors of the workers' own; use the fixture lab_workers instead of "
                "workers"
            )
        return self._cluster


def _duration(seconds: float | None) -> float | None:
    if seconds is not None and not 0 < seconds < math.inf:
        raise SettingError(f"a fault cannot last {seconds} s; give a positive number, or nothing for ever")
    return seconds
