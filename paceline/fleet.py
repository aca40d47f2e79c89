"""The fleet: rank, size, and every exchange between the workers, each with a deadline."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from paceline.blame import Blame, name_ranks
from paceline.errors import FleetError, SettingError, WorkerLost, WorkersDisagree
from paceline.group import Group, Part, Work
from paceline.rendezvous import begin_group, end_group, store_of_this_run
from paceline.watch import Watch

if TYPE_CHECKING:
    from paceline.testing.tell import Line

__all__ = ["Fleet"]

SLICE = 0.25  # seconds between two looks at the watch while waiting
ONE_SLICE = timedelta(seconds=SLICE)
FOREVER = timedelta(days=365)
GRACE = 2.0  # torch's own limit is later than the deadline by so much, so that ours, which can name ranks, comes first


class Fleet(Group):
    """All workers of a run, seen from one of them.

    Use :meth:`join`: it starts torch's process group from the launcher's environment if nobody has, and is a
    fleet of one where there is no launcher.
    """

    def __init__(self, rank: int, size: int, deadline: float, watch: Watch | None) -> None:
        self.rank, self.size, self.deadline = rank, size, deadline
        self._watch = watch
        self._blame = None if watch is None else Blame(watch)
        self._gathers, self._gathered = 0, ""
        self._closed = self._disbanded = False
        self._thread = threading.get_ident()
        self.meanwhile: Callable[[], None] = lambda: None
        """Something short to do while the first wait for others begins; in the thread that made the fleet alone."""
        self._line = _line_to_harness()
        # A collective needs tensors where its backend works: gloo's on the CPU, NCCL's on this worker's GPU (the
        # latter is not exercised by the tests, which have no GPU).
        nccl = watch is not None and dist.get_backend() == "nccl"
        self._nccl = nccl
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        atexit.register(self._at_exit)

    @classmethod
    def join(cls, deadline: float = 300.0) -> Fleet:
        """Become a worker of the fleet that the environment describes (``torchrun``'s variables)."""
        if not deadline > 0:
            raise SettingError(f"deadline ({deadline}) must be a positive number of seconds")
        if not dist.is_initialized():
            size = int(os.environ.get("WORLD_SIZE", "1"))
            if size == 1:
                return cls(0, 1, deadline, None)
            missing = [key for key in ("RANK", "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
            if missing:
                raise SettingError(
                    f"WORLD_SIZE is {size} but {', '.join(missing)} is not set; start the script with "
                    "`paceline run` or `torchrun`, or unset WORLD_SIZE to train in one process"
                )
            begin_group(deadline, timedelta(seconds=deadline + GRACE))
            # It stays for the next run of this process: a group cannot be begun anew on the same store.
            atexit.register(end_group)
        elif dist.get_world_size() > 1:
            # DDP's own collectives run under this limit: without it a frozen worker is noticed after 30 minutes.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=deadline + GRACE), dist.group.WORLD)
        rank, size = dist.get_rank(), dist.get_world_size()
        watch = Watch(store_of_this_run(), rank, size) if size > 1 else None
        return cls(rank, size, deadline, watch)

    @classmethod
    def come_back(cls, deadline: float) -> Fleet:
        """The fleet of a worker that was started again alone: the others have disbanded it long ago."""
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), deadline, None)

    @property
    def torch_limit(self) -> timedelta:
        """Torch's own limit for a wait."""
        return timedelta(seconds=self.deadline + GRACE)

    @property
    def closed(self) -> bool:
        """Whether this worker has left the fleet."""
        return self._closed

    def doing(self, step: int, what: str) -> None:
        """Note what this worker does, for the messages of those who may wait for it."""
        if self._watch:
            self._watch.doing(step, what)
        if self._line is not None:
            self._line.reached(step, what)

    def _check_open(self) -> None:
        if self._disbanded:
            raise FleetError(
                "the workers of this run have gone their own ways since it began, so that nothing can be exchanged "
                "with all of them at once; under Gossip do that before the first run.steps(…), or use another sync"
            )
        if self._closed:
            raise FleetError(
                "this run was closed, so that it cannot exchange anything with other workers; make a new Run"
            )

    def gather(self, blob: bytes, what: str) -> list[bytes]:
        """Every worker's bytes, by rank, on every worker. For small, rare things: it goes through the store.

        Unlike a collective, this does not corrupt anything if only some workers call it: they stop with an error
        that names the others.
        """
        self._check_open()
        if self._watch is None or self._blame is None:
            return [blob]
        self._gathers += 1
        # Who gathers for something else is not met by mistake, even if it is the same time for both.
        prefix, before = f"gather/{self._gathers}/{zlib.crc32(what.encode())}", self._gathered
        self._gathered = prefix
        self._watch.set(f"{prefix}/{self.rank}", blob)
        since = time.monotonic()
        found: dict[int, bytes] = {self.rank: blob}
        while len(found) < self.size:
            # Looked at first: who raised or closed its run may have put its part up before.
            in_trouble = self._watch.trouble is not None
            missing = tuple(rank for rank in range(self.size) if rank not in found)
            done = self._watch.get([f"done/{rank}" for rank in missing])
            gone = [rank for rank in missing if f"done/{rank}" in done]
            come = self._watch.get([f"{prefix}/{rank}" for rank in missing])
            found.update({rank: come[f"{prefix}/{rank}"] for rank in missing if f"{prefix}/{rank}" in come})
            missing = tuple(rank for rank in range(self.size) if rank not in found)
            if gone := [rank for rank in gone if rank in missing]:
                self._watch.post((gone[0],), "has closed its run")
                in_trouble = True
            if missing and (in_trouble or self._watch.trouble is None):
                self._blame.look_around(what, since, self.deadline, missing)
                time.sleep(0.002 if time.monotonic() - since < 1 else 0.05)
        self._watch.attend(False)
        # Who has come to this gathering has read the one before, so that this worker's part of it can go.
        self._watch.drop(f"{before}/{self.rank}")
        return [found[rank] for rank in range(self.size)]

    def disband(self) -> None:
        """From now on every worker is on its own: no heartbeats, no collectives, nobody stops when one dies."""
        self.gather(b"", "all workers to be ready to go their own ways")
        if self._watch:
            self._watch.close()
        self._watch = self._blame = None
        self._disbanded = True

    def agree(self, items: dict[str, str]) -> None:
        """Compare settings between workers; a difference is an error that names the item, values and workers."""
        gathered = self.gather(msgspec.json.encode(items), "the others' settings")
        theirs = [msgspec.json.decode(blob, type=dict[str, str]) for blob in gathered]
        differences = []
        for key in dict.fromkeys(key for one in theirs for key in one):
            by_value: defaultdict[str, list[int]] = defaultdict(list)
            for rank, one in enumerate(theirs):
                by_value[one.get(key, "nothing")].append(rank)
            if len(by_value) > 1:
                told = "; ".join(f"{name_ranks(ranks)}: {value}" for value, ranks in by_value.items())
                differences.append(f"the {key} differs between workers ({told})")
        if differences:
            raise WorkersDisagree(
                " and ".join(differences) + "; start all workers with the same code, arguments and data"
            )

    def wait(self, start: Callable[[], Work], what: str) -> None:
        """Start a collective and wait for it, not longer than the deadline."""
        self._check_open()
        since = time.monotonic()
        try:
            work = start()
        except RuntimeError as error:
            raise self.lost(what, since, error) from error
        if threading.get_ident() == self._thread:  # averages in the background wait in a thread of their own
            self.meanwhile()
        try:
            while not self._done(work):
                assert self._blame is not None
                self._blame.look_around(what, since, self.deadline)
        except RuntimeError as error:
            if isinstance(error, WorkerLost):
                raise
            raise self.lost(what, since, error) from error
        if self._watch:
            self._watch.attend(False)

    @contextmanager
    def patiently(self, parts: Sequence[Part] = ()) -> Iterator[None]:
        """While inside, the deadline is for the time in which no other worker moves on, not for the whole wait.

        For one that has left the loop, and meets the others, or ``parts`` of them, when they have done what they have
        to do.
        """
        if self._blame is None:
            yield
            return
        handles = [dist.group.WORLD, *(part.handle for part in parts if part.handle is not None and part.rank >= 0)]
        with self._blame.while_they_move():
            try:
                for handle in handles:
                    dist.distributed_c10d._set_pg_timeout(FOREVER, handle)
                yield
            finally:
                for handle in handles:
                    dist.distributed_c10d._set_pg_timeout(self.torch_limit, handle)

    def lost(self, what: str, since: float, error: BaseException) -> WorkerLost:
        """Find out whose fault a broken connection is; takes a few heartbeats at most."""
        if self._blame is None:
            return WorkerLost(str(error), ranks=(), waited_for=what, seconds=time.monotonic() - since)
        return self._blame.for_broken(what, since, self.deadline, error)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this worker fails, so that they need not wait for it."""
        if self._watch and self._watch.trouble is None:
            self._watch.post((self.rank,), f"raised {type(error).__name__}: {error}")

    def leave(self, why: str) -> None:
        """Tell the others that this worker has left a loop that they may still be in.

        Workers count how often they left: who has left as often as another was in the same place, and knows.
        """
        if self._watch:
            self._watch.leave(f"{why} (step {self._watch.step})", tell=self._watch.trouble is None and not self._closed)

    def close(self) -> None:
        """Leave the fleet in order: wait, within limits, until all others are done, too."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._watch:
            # Rank 0 may host the store, and a socket that closes under a slower worker breaks its last collective.
            self._watch.set(f"done/{self.rank}", b"done")
            end = time.monotonic() + min(self.deadline, 10.0)
            waiting = set(range(self.size))
            while waiting and self._watch.trouble is None and time.monotonic() < end:
                done = self._watch.get([f"done/{rank}" for rank in waiting])
                waiting = {rank for rank in waiting if f"done/{rank}" not in done}
                time.sleep(0.002)
            if self.rank == 0:
                self._watch.spread()
            self._watch.close()

    def _done(self, work: Work) -> bool:
        if self._nccl:  # wait() of NCCL does not block the host: poll instead
            end = time.monotonic() + SLICE
            while not work.is_completed() and time.monotonic() < end:
                time.sleep(0.0002)
            return work.is_completed()
        try:
            work.wait(ONE_SLICE)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait(ONE_SLICE)  # it may have been completed just after the slice had passed: then all is well
        return True

    def _at_exit(self) -> None:
        """The script ended without closing the run: say so, instead of letting the others guess."""
        error: object = getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            self.fail(error)
        else:
            self.leave("ended its process")
        self.close()


def _line_to_harness() -> Line | None:
    """To the test that has started this worker, if one has: it lets faults happen at exact steps."""
    if "PACELINE_TESTING" not in os.environ:
        return None
    from paceline.testing.tell import line  # a run without a test has no use for the package

    return line()
