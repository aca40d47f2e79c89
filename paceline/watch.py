"""Who is alive, and what went wrong: heartbeats and one notice of trouble on torch's store.

A collective that waits for a dead or frozen worker cannot say for whom it waits. So every worker writes a
heartbeat with what it is doing to the store that torch already runs, and whoever meets trouble first posts it
there; all others read it and stop with the same cause. All traffic with the store is in one daemon thread: if
the store itself freezes, the training thread does not.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["Beat", "Trouble", "Watch"]

INTERVAL = 0.5  # seconds between heartbeats
SILENT = 4 * INTERVAL  # no heartbeat for so long: dead, frozen or cut off


class Beat(msgspec.Struct, frozen=True):
    """A heartbeat: what a worker does, and since when (by its own clock)."""

    count: int
    step: int
    doing: str
    seconds: float
    leaves: int = 0
    """How often it has left a loop that others may have been in."""
    left: str = ""
    """How it left the last time."""


class Trouble(msgspec.Struct, frozen=True):
    """What stopped the fleet: the same notice is read by all workers."""

    ranks: tuple[int, ...]
    """The workers at fault; empty if that could not be found out."""
    found_by: int
    step: int
    text: str


class Watch:
    """The thread that keeps this worker's heartbeat and reads the others'."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.trouble: Trouble | None = None
        self._store = store
        self._doing: tuple[int, str, float] = (0, "starting", time.monotonic())
        self._beats: dict[int, tuple[Beat, float]] = {}
        self._alive: set[int] = set()
        self._attentive = False
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._closed = False
        self._count = 0
        self._told = False
        self.leaves = 0
        """How often this worker has left a loop."""
        self._left = ""
        self._answered = time.monotonic()
        self._beat()
        self._thread = threading.Thread(target=self._loop, name="paceline-watch", daemon=True)
        self._thread.start()

    def doing(self, step: int, what: str) -> None:
        """Tell what this worker does now; costs nothing until the next heartbeat."""
        self._doing = (step, what, time.monotonic())

    @property
    def step(self) -> int:
        """The step that this worker is in."""
        return self._doing[0]

    def attend(self, on: bool) -> None:
        """Start or stop reading the others' heartbeats: done while a wait has become long."""
        if on and not self._attentive:
            self._beats.clear()
            self._alive.clear()
            self._wake.set()
        self._attentive = on

    def leave(self, why: str, tell: bool) -> None:
        """This worker has left the loop; to ``tell`` the others so, a heartbeat comes at once."""
        self.leaves += 1
        self._left = why
        if tell:
            self.ask(self._beat, seconds=SILENT)

    def leavers(self) -> dict[int, str]:
        """The workers that have left loops more often than this one, with how, as far as it was heard.

        Who has left as often was in the same place.
        """
        return {rank: beat.left for rank, (beat, _) in list(self._beats.items()) if beat.leaves > self.leaves}

    def silent(self) -> dict[int, float]:
        """The workers that have sent no heartbeat for ``SILENT`` seconds, with the seconds."""
        now = time.monotonic()
        if now - self._answered > SILENT and self._attentive:
            return {0: now - self._answered}  # the store, which rank 0 or its launcher hosts, does not answer
        # By what was read last: while the store does not answer, nobody is heard, and that is nobody's own silence.
        beats = list(self._beats.items())
        return {rank: now - at for rank, (_, at) in beats if self._answered - at >= SILENT}

    def undecided(self) -> bool:
        """Whether some worker may be alive or not: its heart has not beaten again since this one attends, nor was
        it ``silent`` for long enough."""
        return not self.silent() and len(self._alive) < self.size - 1

    def places(self) -> dict[int, tuple[int, str]]:
        """The step that every other worker was in when it was last heard, and what it did there."""
        return {rank: (beat.step, beat.doing) for rank, (beat, _) in list(self._beats.items())}

    def elsewhere(self) -> tuple[int, ...]:
        """The workers that were doing something else than this one when they were last heard."""
        return tuple(rank for rank, place in self.places().items() if place != self._doing[:2])

    def last_words(self, rank: int) -> str:
        """What a worker said last, for error messages."""
        if rank not in self._beats:
            return "nothing was heard from it"
        beat, at = self._beats[rank]
        age = time.monotonic() - at
        return f"last heartbeat {age:.1f} s ago: {beat.doing}, step {beat.step}, for {beat.seconds:.1f} s then"

    def post(self, ranks: tuple[int, ...], text: str) -> None:
        """Put up a notice of trouble, unless there is one; it reaches all workers within a heartbeat."""
        notice = Trouble(ranks=ranks, found_by=self.rank, step=self.step, text=text)

        def put() -> None:
            self._store.compare_set("trouble", "", msgspec.json.encode(notice).decode())
            self._read_trouble()

        self.ask(put, seconds=SILENT)
        self.trouble = self.trouble or notice  # the store may be gone: then this worker stops on its own finding

    def spread(self) -> None:
        """Stay until the others have read the notice, if there is one: they cannot any more when the store is gone."""
        if self.trouble is None:
            return
        waiting = set(range(self.size)) - {self.rank}
        end = time.monotonic() + SILENT
        while (waiting := waiting - self.silent().keys()) and time.monotonic() < end:
            found = self.get([f"{word}/{rank}" for rank in waiting for word in ("told", "done")])
            waiting = {rank for rank in waiting if not {f"told/{rank}", f"done/{rank}"} & found.keys()}
            time.sleep(0.01)

    def ask(self, call: Callable[[], Any], seconds: float) -> Any:
        """Run a call on the store in the watch thread and give its answer; None if it takes too long."""
        done = threading.Event()
        answer: list[Any] = []

        def run() -> None:
            try:
                answer.append(call())
            finally:
                done.set()

        self._calls.put(run)
        self._wake.set()
        done.wait(seconds)
        return answer[0] if answer else None

    def set(self, key: str, value: bytes) -> None:
        """Write a value of this run to the store."""
        self.ask(lambda: self._store.set(key, value), seconds=SILENT)  # type: ignore[arg-type]  # takes bytes, too

    def get(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Read those of these values of this run that are in the store, within one limit for all of them."""

        def read() -> dict[str, bytes]:
            return {key: bytes(self._store.get(key)) for key in keys if self._store.check([key])}

        found = self.ask(read, seconds=SILENT)
        return found if isinstance(found, dict) else {}

    def drop(self, key: str) -> None:
        """Remove a value of this run from the store."""
        self.ask(lambda: self._store.delete_key(key), seconds=SILENT)

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()
        self._thread.join(SILENT)

    def _loop(self) -> None:
        while not self._closed:
            try:
                while True:
                    self._calls.get_nowait()()
            except queue.Empty:
                pass
            except RuntimeError:  # the store is gone; waits are bounded by their deadline
                pass
            try:
                self._beat()
                self._read_trouble()
                if self._attentive:
                    self._read_beats()
                self._answered = time.monotonic()
            except RuntimeError:  # torch's DistStoreError, DistNetworkError: the store's host has ended
                pass
            self._wake.wait(INTERVAL)
            self._wake.clear()

    def _beat(self) -> None:
        step, doing, since = self._doing
        self._count += 1
        beat = Beat(self._count, step, doing, time.monotonic() - since, self.leaves, self._left)
        self._store.set(f"beat/{self.rank}", msgspec.json.encode(beat).decode())

    def _read_trouble(self) -> None:
        if not self._told and self._store.check(["trouble"]):
            self.trouble = msgspec.json.decode(self._store.get("trouble"), type=Trouble)
            self._store.set(f"told/{self.rank}", "")
            self._told = True

    def _read_beats(self) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        values = self._store.multi_get([f"beat/{rank}" for rank in others])
        now = time.monotonic()
        for rank, value in zip(others, values, strict=True):
            beat = msgspec.json.decode(value, type=Beat)
            before = self._beats.get(rank)
            if before is None or before[0].count != beat.count:
                self._beats[rank] = (beat, now)
            if before is not None and before[0].count != beat.count:
                self._alive.add(rank)
