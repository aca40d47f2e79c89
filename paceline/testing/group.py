"""A group of workers: what they do, what happens to them, and what became of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import SettingError
from paceline.testing.course import Course
from paceline.testing.faults import At, Fault, Moment
from paceline.testing.outcome import Outcome
from paceline.testing.places import Place
from paceline.testing.processes import Work

__all__ = ["Group"]


class Group:
    """Workers that will be started: say with :meth:`at` what happens to them, then :meth:`wait` for their end."""

    def __init__(self, place: Place, work: Work, environment: Mapping[str, str], folder: Path) -> None:
        self._place, self._work, self._environment, self._folder = place, work, environment, folder
        self._moments: list[Moment] = []
        self._faults: dict[tuple[int, int, str], Fault] = {}
        self._course: Course | None = None
        self._closed = False

    @property
    def forgotten(self) -> bool:
        """Whether faults were declared for it, but it was never started."""
        return bool(self._moments) and self._course is None and not self._closed

    def at(self, *, step: int, worker: int, stage: str = "computing", delay: float = 0.0) -> At:
        """When a fault happens: as a worker comes to a stage of a step, or ``delay`` seconds after it has gone on.

        The stages of a step of ``Run`` are ``"computing"`` (it begins), ``"averaging gradients"`` and ``"updating"``.
        The worker stands still there until the fault has happened (or, with a delay, until it is noted). A script
        without ``Run`` says where it is with :func:`~paceline.testing.reached`.
        """
        self._check_new("faults must be declared before")
        size = self._place.size
        if not 0 <= worker < size:
            raise SettingError(f"there is no worker {worker}: the group has {size}, from 0 to {size - 1}")
        if step < 0:
            raise SettingError(f"there is no step {step}: steps are counted from 0")
        if not 0 <= delay < math.inf:
            raise SettingError(f"a delay of {delay} s is not possible; it must be 0 or more")
        moment = Moment(worker, step, stage, delay)
        self._moments.append(moment)
        return At(moment, self._place.cluster, self._take)

    def start(self) -> None:
        """Start all workers; :meth:`wait` does it, too. They stand still at the first fault until :meth:`wait`."""
        self._check_new("it can be started once; make a new one")
        declared = {fault.moment for fault in self._faults.values()}
        for moment in self._moments:
            if moment not in declared:
                self._closed = True
                raise SettingError(f"group.at(…) for {moment} says when, but not what; add .kill() or another fault")
        self._course = Course(self._place, self._faults.values())
        self._course.start(self._work, self._environment, self._folder)

    def wait(self, seconds: float, *, besides: Sequence[int] = ()) -> Outcome:
        """Let everything happen, until all workers have ended; what still runs then is killed.

        Those that are frozen for ever, and those of ``besides``, need not end once all has happened to them. It is an
        error if others still run after so many seconds, or if a worker ended before the step of its fault.
        """
        __tracebackhide__ = True
        if self._closed or not seconds > 0:
            why = "has ended already; make a new one" if self._closed else f"cannot be waited for {seconds} s"
            raise SettingError(f"the group {why}")
        for worker in besides:
            if not 0 <= worker < self._place.size:
                raise SettingError(f"besides={list(besides)} names worker {worker}, which does not exist")
        if self._course is None:
            self.start()
        assert self._course is not None
        try:
            late = self._course.go_on(time.monotonic() + seconds, besides)
            outcome = self._course.outcome()
        finally:
            self.close()
        missed = ", ".join(map(str, self._course.missed))
        if late:
            still = f"; these faults have not happened: {missed}" if missed else ""
            raise AssertionError(f"{_workers(late)} had not ended after {seconds:g} s{still}\n\n{outcome}")
        if missed:
            raise SettingError(
                f"the run ended before this could happen: {missed}; the worker never came to that step and stage (a "
                f"script without Run has to call paceline.testing.reached(step))\n\n{outcome}"
            )
        return outcome

    def close(self) -> None:
        """Kill whatever is left of the workers; may be called twice."""
        self._closed = True
        if self._course is not None:
            self._course.close()

    def _check_new(self, why: str) -> None:
        if self._course is not None or self._closed:
            raise SettingError(f"the group has been started: {why}")

    def _take(self, fault: Fault) -> None:
        if (before := self._faults.get(fault.moment.key)) is not None:
            raise SettingError(f"there is a fault at that moment already: {before}")
        self._faults[fault.moment.key] = fault


def _workers(ranks: Sequence[int]) -> str:
    return ("worker " if len(ranks) == 1 else "workers ") + ", ".join(map(str, ranks))
