"""What befalls the workers of a training: kills, freezes and cuts, each when a part of it is done."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.survivor import reached
from benchmarks.victims import Victim
from paceline.lab import cluster
from paceline.testing.places import Place

__all__ = ["Blow", "Course", "Healed"]

TRAINING = 3600.0  # seconds that a training may take


class Blow(NamedTuple):
    """What happens to a worker or a site, when all together have used so many percent of the examples."""

    at: int
    do: Literal["kill", "freeze", "cut"]
    target: int | str
    seconds: float = math.inf
    """Until it is over: started again, thawed, restored."""

    @property
    def workers(self) -> set[int]:
        """To which something is done. Both sides of a cut between sites can go on."""
        return {self.target} if isinstance(self.target, int) else set()


class Healed(NamedTuple):
    """A blow was over at this time, in seconds since 1970."""

    time: float
    blow: Blow


class Course:
    """Lets everything happen, until all that are alive have come to the end."""

    def __init__(self, workers: Sequence[Victim], place: Place, blows: Sequence[Blow], folder: Path) -> None:
        self._workers, self._place, self._folder = workers, place, folder
        self._coming = list(blows)
        self._open: list[tuple[float, Blow]] = []
        self.healed: list[Healed] = []

    def happen(self) -> None:
        """Until the end."""
        limit = time.monotonic() + TRAINING
        while not all(each.dead or each.finished for each in self._workers) or self._returns:
            now = time.monotonic()
            if now > limit:
                raise AssertionError(f"the training has not come to its end in {TRAINING:g} s")
            for each in self._workers:
                each.check(may_finish=True)
                if each.lives > 1 and not each.dead and not each.trains and self._over:
                    each.kill()  # it has come too late, and would wait for its deadline
            for blow in [each for each in self._coming if reached(self._folder, each.at).exists()]:
                self._coming.remove(blow)
                self._befall(blow)
                self._open.append((now + blow.seconds, blow))
            for due, blow in list(self._open):
                if now >= due:
                    self._open.remove((due, blow))
                    self._heal(blow)
            time.sleep(0.02)

    @property
    def _over(self) -> bool:
        """Whether somebody has come to the end."""
        return any(each.finished for each in self._workers)

    @property
    def _returns(self) -> bool:
        """Whether somebody who is dead is to be started again."""
        return any(blow.do == "kill" and due < math.inf for due, blow in self._open)

    def _befall(self, blow: Blow) -> None:
        match blow.do, blow.target:
            case "kill", int(rank):
                self._workers[rank].kill()
            case "freeze", int(rank):
                self._workers[rank].freeze()
            case "cut", target:
                self._place.change(cluster.Event(0, _name(target), "cut"))

    def _heal(self, blow: Blow) -> None:
        match blow.do, blow.target:
            case "kill", int(rank):
                self._workers[rank].begin()
            case "freeze", int(rank):
                self._workers[rank].thaw()
            case "cut", target:
                self._place.change(cluster.Event(0, _name(target), "restore"))
        self.healed.append(Healed(time.time(), blow))


def _name(target: int | str) -> str:
    return f"w{target}" if isinstance(target, int) else target
