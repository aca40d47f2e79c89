"""Run a command on every worker of a lab: output, events, signals, endings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import LabError
from paceline.lab.cluster import Event
from paceline.lab.lab import Lab
from paceline.lab.report import EventReport, Report, WorkerReport

__all__ = ["TIMED_OUT", "run_workers"]

TIMED_OUT = 124  # what timeout(1) says
GRACE = 30.0  # seconds for workers to end in order after a signal: Paceline's write a checkpoint then
LAST_WORDS = 2.0  # seconds for what a worker has started to end with it
JOINING = 10.0  # seconds for a new process to join its groups
LINE = 1 << 20  # characters of a line of output that are kept together

Show = Callable[[str, str], None]
"""Shows a line of a worker's output."""


def run_workers(
    lab: Lab,
    command: Sequence[str],
    *,
    show: Show,
    folder: Path | None = None,
    limit: float | None = None,
    name: str = "cluster",
) -> Report:
    """Run a command as every worker, let the events happen, and wait for all to end.

    Ctrl-C and SIGTERM are passed on to the workers, which have 30 seconds to end then; a second one kills them.
    ``limit`` is in seconds: whoever still runs then is killed. ``folder`` gets the report and each worker's output.
    """
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(_Runner(lab, list(command), show, folder, limit, name).run())
        if folder is not None:
            (folder / "lab.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    except (OSError, UnicodeError) as error:
        raise LabError(f"what the workers wrote, or the report, cannot be written: {error}") from error
    return report


@dataclass
class _Running:
    process: Process
    follower: asyncio.Task[None]
    since: float
    until: float = 0.0
    ended_by: str | None = None
    frozen: bool = False

    @property
    def alive(self) -> bool:
        return self.process.returncode is None


@dataclass
class _Runner:
    lab: Lab
    command: list[str]
    show: Show
    folder: Path | None
    limit: float | None
    name: str
    running: dict[str, _Running] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    events: list[EventReport] = field(default_factory=list)
    began: float = 0.0
    signals: list[signal.Signals] = field(default_factory=list)
    ending: str = ""
    """Why no worker is started any more, and who still runs is killed."""

    async def run(self) -> Report:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._pass_on, number)
        cluster = self.lab.cluster
        try:
            for worker in cluster.workers:
                if worker.name not in cluster.late:
                    await self._start(worker.name)
            started, self.began = time.time(), time.monotonic()
            self._spawn(self._events())
            if self.limit is not None:
                self._spawn(self._end_after(self.limit, f"limit of {self.limit:g} s"))
            await self._all_ended()
        except BaseException:
            self._kill_all("error")
            if self.running:
                await asyncio.wait([each.follower for each in self.running.values()], timeout=2 * LAST_WORDS)
            raise
        missed = cluster.events[len(self.events) :]
        return Report(
            cluster=self.name,
            command=self.command,
            started=started,
            seconds=time.monotonic() - self.began,
            workers=[self._report(worker.name) for worker in cluster.workers],
            events=[*self.events, *(EventReport(str(event), event.at, None) for event in missed)],
            exit=self._exit(),
        )

    async def _start(self, name: str) -> None:
        """Start a worker, and wait until it is in its groups: before that, nothing could happen to it."""
        if self._is_ending():
            return
        environment = {**os.environ, **self.lab.environment(name)}
        process = await asyncio.create_subprocess_exec(
            *self.lab.command(name, self.command),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            limit=LINE,
            start_new_session=True,  # Ctrl-C at the terminal is for the lab, which passes it on
        )
        follower = self._spawn(self._follow(name, process))
        self.running[name] = _Running(process, follower, time.monotonic())
        end = time.monotonic() + JOINING
        while process.returncode is None and not self.lab.has_joined(name, process.pid):
            if time.monotonic() > end:
                raise LabError(f"worker {name} was not ready to begin within {JOINING:g} s")
            await asyncio.sleep(0.002)
        if self._is_ending():  # meanwhile
            self._kill(name, self.ending or "stopped")

    def _is_ending(self) -> bool:
        return bool(self.ending or self.signals)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def _follow(self, name: str, process: Process) -> None:
        """Pass on what a worker writes, and see when it ends; what it has started ends soon after it."""
        pump = self._spawn(self._pump(name, process))
        while process.returncode is None:
            await asyncio.sleep(0.01)
        ended = time.monotonic()
        await asyncio.wait([pump], timeout=GRACE if self.signals else LAST_WORDS)
        self.lab.send(name, signal.SIGKILL)
        await asyncio.wait([pump], timeout=LAST_WORDS)  # a process that has left the group may hold the pipe open
        pump.cancel()
        process._transport.close()  # type: ignore[attr-defined]  # asyncio has no other way to let go of such a pipe
        self.running[name].until = ended

    async def _pump(self, name: str, process: Process) -> None:
        """Pass on what a worker writes, line by line."""
        assert process.stdout is not None
        with contextlib.ExitStack() as files:
            log = None if self.folder is None else files.enter_context(open(self.folder / f"{name}.log", "w"))
            while True:
                try:
                    line = await process.stdout.readuntil(b"\n")
                except asyncio.IncompleteReadError as error:
                    line = error.partial
                except asyncio.LimitOverrunError as error:
                    line = await process.stdout.read(error.consumed)
                if not line:
                    return
                text = line.decode(errors="replace").rstrip("\n")
                self.show(name, text)
                if log is not None:
                    print(text, file=log, flush=True)

    async def _events(self) -> None:
        for event in self.lab.cluster.events:
            await asyncio.sleep(max(0.0, self.began + event.at - time.monotonic()))
            happened = time.monotonic() - self.began
            await self._happen(event)
            self.events.append(EventReport(str(event), event.at, round(happened, 3)))
            self.show("lab", f"{happened:.2f} s: {event}")

    async def _happen(self, event: Event) -> None:
        if event.do == "start":
            await self._start(event.target)
            return
        self.lab.apply(event)
        if (running := self.running.get(event.target)) is not None and running.alive:
            if event.do == "kill":
                running.ended_by = "kill event"
            elif event.do in ("freeze", "thaw"):
                running.frozen = event.do == "freeze"

    async def _all_ended(self) -> None:
        """Wait for all workers; those that nothing will thaw any more are killed when the others have ended."""
        while not self.running or any(not each.until for each in self.running.values()):
            if self.ending and not self.running:
                return
            for task in self.tasks:
                if task.done() and not task.cancelled():
                    task.result()  # an error in an event, or a full disk, is an error of the whole
            rest = {name: each for name, each in self.running.items() if not each.until}
            if rest and all(each.frozen and not self._thaws(name) for name, each in rest.items()):
                for name in rest:
                    self._kill(name, "frozen")
            await asyncio.sleep(0.01)

    def _thaws(self, name: str) -> bool:
        coming = self.lab.cluster.events[len(self.events) :]
        return any(event.target == name and event.do in ("thaw", "kill") for event in coming)

    async def _end_after(self, seconds: float, why: str) -> None:
        await asyncio.sleep(seconds)
        self._kill_all(why)

    def _kill_all(self, why: str) -> None:
        self.ending = self.ending or why
        for name in self.running:
            self._kill(name, why)

    def _kill(self, name: str, why: str) -> None:
        running = self.running[name]
        if running.alive:
            running.ended_by = running.ended_by or why
            self.lab.send(name, signal.SIGKILL)

    def _pass_on(self, number: signal.Signals) -> None:
        self.signals.append(number)
        if len(self.signals) > 1 or not self.running:
            self._kill_all("stopped")
            return
        for each in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, number)  # it leads a session: a shell's script hears it, too
        self._spawn(self._end_after(GRACE, f"not ended {GRACE:g} s after {number.name}"))

    def _report(self, name: str) -> WorkerReport:
        worker = self.lab.worker(name)
        running = self.running.get(name)
        if running is None:
            return WorkerReport(name=name, rank=worker.rank, exit=None)
        wall, use, traffic = running.until - running.since, self.lab.use(name), self.lab.traffic(name)
        return WorkerReport(
            name=name,
            rank=worker.rank,
            exit=running.process.returncode,
            ended_by=running.ended_by,
            started=round(running.since - self.began, 3),
            wall_seconds=wall,
            cpu_seconds=use.cpu_seconds,
            throttled_seconds=use.throttled_seconds,
            waiting_seconds=max(0.0, wall - use.cpu_seconds - use.throttled_seconds),
            bytes_sent=traffic.sent,
            bytes_received=traffic.received,
        )

    def _exit(self) -> int:
        """The code of the worker that failed first by itself, as a shell gives it."""
        if any(each.ended_by and each.ended_by.startswith("limit") for each in self.running.values()):
            return TIMED_OUT
        failed = [each for each in self.running.values() if each.process.returncode and each.ended_by is None]
        if not failed:
            return 128 + self.signals[0] if self.signals else 0
        code = min(failed, key=lambda each: each.until).process.returncode or 0
        return code if code > 0 else 128 - code
