"""The course of a group from its start to its end: workers are heard, and faults happen."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from paceline.testing.desk import Desk, Message
from paceline.testing.faults import Deed, Fault
from paceline.testing.outcome import Ending, Outcome
from paceline.testing.places import Place
from paceline.testing.processes import Work, end, start
from paceline.testing.tell import VARIABLE, describe

__all__ = ["Course"]

SLICE = 0.25  # seconds between two looks at the clock while nothing happens


@dataclass
class _Running:
    process: BaseProcess
    log: Path
    ended: float | None = None
    digest: str | None = None
    fate: signal.Signals | None = None
    """SIGKILL: it ends at once, SIGSTOP: it cannot end."""
    faults: list[str] = field(default_factory=list)


class _Later(NamedTuple):
    due: float
    worker: int
    act: Callable[[], None]


class Course:
    """Workers that run, and the faults that are still to come."""

    def __init__(self, place: Place, faults: Iterable[Fault]) -> None:
        self._place = place
        self._coming = {fault.moment.key: fault for fault in faults}
        self._later: list[_Later] = []
        self._workers: list[_Running] = []
        self._desk: Desk | None = None
        self._began = 0.0
        self._last_fault: float | None = None
        self._exits = ExitStack()

    @property
    def missed(self) -> list[Fault]:
        """The faults that have not happened."""
        return list(self._coming.values())

    def start(self, work: Work, environment: Mapping[str, str], folder: Path) -> None:
        """Start all workers, or none; each writes to a file of its own in the folder."""
        try:
            self._exits.callback(self._place.close)
            self._place.open()
            self._desk = Desk()
            self._exits.callback(self._desk.close)
            self._began = time.monotonic()
            for worker in range(self._place.size):
                log = folder / f"worker-{worker}.log"
                log.touch()
                stops = [(step, stage) for who, step, stage in self._coming if who == worker]
                told = {VARIABLE: describe(self._desk.path, worker, stops)}
                variables = {**os.environ, **self._place.environment(worker), **environment, **told}
                process = start(self._place.enter(worker, work), variables, log)
                self._workers.append(_Running(process, log))
                self._exits.callback(end, process)
        except BaseException:
            self.close()
            raise

    def go_on(self, end: float, besides: Sequence[int]) -> list[int]:
        """Hear workers and let faults happen; gives the workers that should have ended by then, but have not."""
        assert self._desk is not None
        while True:
            now = time.monotonic()
            for running in self._workers:
                if running.ended is None and running.process.exitcode is not None:
                    running.ended = now
            alive = [worker for worker, running in enumerate(self._workers) if running.ended is None]
            self._later = [one for one in self._later if one.worker in alive]
            waiting = [worker for worker in alive if self._must_end(worker, besides)]
            if not waiting or now > end:
                return waiting
            due = min([end, now + SLICE, *(one.due for one in self._later)])
            sentinels = [self._workers[worker].process.sentinel for worker in alive]
            for call in self._desk.hear(sentinels, max(0.0, due - now)):
                self._told(call.message)
                call.answer()
            self._do_what_is_due()

    def outcome(self) -> Outcome:
        """What has become of the workers by now."""
        now = time.monotonic()
        return Outcome(tuple(self._ending(worker, running, now) for worker, running in enumerate(self._workers)))

    def close(self) -> None:
        """Kill all workers and leave the place; may be called twice."""
        self._exits.close()

    def _must_end(self, worker: int, besides: Sequence[int]) -> bool:
        """Whether there is still something to come from a worker that runs."""
        if worker in {who for who, _, _ in self._coming} or worker in {one.worker for one in self._later}:
            return True
        fate = self._workers[worker].fate
        return fate is signal.SIGKILL or not (fate is signal.SIGSTOP or worker in besides)

    def _told(self, message: Message) -> None:
        if message.digest is not None:
            self._workers[message.worker].digest = message.digest
        fault = self._coming.get((message.worker, message.step, message.stage))
        if fault is not None:
            self._after(fault.moment.delay, fault, lambda: self._happen(fault))

    def _after(self, seconds: float, fault: Fault, act: Callable[[], None]) -> None:
        if seconds:
            self._later.append(_Later(time.monotonic() + seconds, fault.moment.worker, act))
        else:
            act()

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for one in [one for one in self._later if one.due <= now]:
            self._later.remove(one)
            one.act()

    def _happen(self, fault: Fault) -> None:
        worker = fault.moment.worker
        running = self._workers[worker]
        # A script that tells of a step twice has met with the fault the first time.
        if running.process.exitcode is not None or self._coming.pop(fault.moment.key, None) is None:
            return
        self._last_fault = time.monotonic()
        self._do(worker, fault.do)
        running.faults.append(str(fault))
        if fault.seconds is not None:
            self._after(fault.seconds, fault, lambda: self._do(worker, fault.undo))
        elif fault.do in (signal.SIGKILL, signal.SIGSTOP):
            running.fate = signal.Signals(fault.do)

    def _do(self, worker: int, deed: Deed) -> None:
        if isinstance(deed, signal.Signals):
            self._place.send(worker, self._workers[worker].process, deed)
        elif deed is not None:
            self._place.change(deed)

    def _ending(self, worker: int, running: _Running, now: float) -> Ending:
        ended = running.ended or now
        after = None if self._last_fault is None or ended < self._last_fault else ended - self._last_fault
        return Ending(
            worker=worker,
            code=None if running.ended is None else running.process.exitcode,
            output=running.log.read_text(errors="replace"),
            seconds=ended - self._began,
            seconds_after_fault=after,
            faults=tuple(running.faults),
            digest=running.digest,
        )
