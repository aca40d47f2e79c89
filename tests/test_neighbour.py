"""Two workers of one machine: both have what they share or none has, and nothing of it stays."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from paceline import neighbour
from paceline.fleet import Fleet
from paceline.group import Group, Part
from paceline.neighbour import Neighbour, Ringing, place
from tests.lab.needs import needs_lab
from tests.pool import Pool


@contextmanager
def group_of_all(part: bool) -> Iterator[Group]:
    fleet = Fleet.join(10.0)
    group = Part(fleet, list(range(fleet.size))) if part else fleet
    try:
        yield group
    finally:
        if isinstance(group, Part):
            group.close()
        fleet.close()


def files() -> list[str]:
    """What is open of the kinds that are shared; gloo opens connections when it likes."""
    gc.collect()
    names = [os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd") if _is_open(one)]
    return sorted(name for name in names if name.startswith(("pipe:", "/memfd:paceline", "anon_inode:[pidfd]")))


def _is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")  # the listing had one open itself


def talk(part: bool, unable: tuple[int, ...]) -> object:
    """What a worker reads of what the other wrote before it rang, twice; None if they share nothing."""
    with group_of_all(part) as group:
        before = files()
        other = Neighbour.meet(group, 64, able=group.rank not in unable)
        found: list[int] | None = None
        if other is not None:
            found = []
            for turn in (10, 20):
                other.memory[turn + group.rank] = turn + group.rank
                other.ring()
                assert other.heard(10.0)
                found.append(other.memory[turn + 1 - group.rank])
            assert not other.heard(0.0)
            group.gather(b"", "the other to have said all")  # who drops what is shared closes its bells
        del other
        assert files() == before
        return found


@pytest.mark.parametrize("part", [False, True], ids=["all", "part"])
def test_each_sees_what_the_other_has_written(pool: Pool, part: bool) -> None:
    assert pool.run(2, talk, part, ()) == [[11, 21], [10, 20]]


@pytest.mark.parametrize("unable", [(0,), (1,), (0, 1)])
def test_both_or_none(pool: Pool, unable: tuple[int, ...]) -> None:
    assert pool.run(2, talk, False, unable) == [None, None]


def nowhere(*_: object) -> None:
    raise OSError(errno.EPERM, "no")


BROKEN: dict[str, tuple[int, object, str, Callable[..., object]]] = {
    "another machine": (1, neighbour, "place", lambda: "somewhere else"),
    "no Linux": (1, neighbour, "place", lambda: ""),
    "no Linux at rank 0": (0, neighbour, "place", lambda: ""),
    "no memory of that kind": (0, os, "memfd_create", nowhere),
    "no room": (0, os, "ftruncate", nowhere),
    "no pipes": (0, os, "pipe2", nowhere),
    "another user": (1, os, "open", nowhere),
    "no more files": (1, os, "dup", nowhere),
    "no more files at rank 0": (0, os, "dup", nowhere),
    "old system": (1, os, "pidfd_open", nowhere),
    "old system at rank 0": (0, os, "pidfd_open", nowhere),
}


def meet(broken: str) -> object:
    """Whether the workers share something, where one of them cannot."""
    rank, owner, name, instead = BROKEN[broken]
    with group_of_all(part=False) as group, pytest.MonkeyPatch.context() as patch:
        before = files()
        if group.rank == rank:
            patch.setattr(owner, name, instead)
        found = Neighbour.meet(group, 64) is not None
        patch.undo()
        assert files() == before
        return found


@pytest.mark.parametrize("broken", BROKEN)
def test_one_who_cannot_keeps_both_from_it(pool: Pool, broken: str) -> None:
    assert pool.run(2, meet, broken) == [False, False]


def test_something_else_at_that_place_is_not_taken() -> None:
    """A number of a file may mean another file by now, or in another process."""
    before = files()
    with ExitStack() as stack:
        made = neighbour._make(64, stack)
        assert made is not None
        whole = neighbour._answer(made.offer, os.getpid(), 64)
        assert whole is not None
        assert neighbour._answer(made.offer, os.getpid(), 32) is None  # the token is not there
        assert neighbour._answer(made.offer, os.getpid(), 4096) is None  # not so large
        changes: list[dict[str, Any]] = [
            {"token": "00" * 16},
            {"memory": 999},
            {"bells": (999, 999)},
        ]
        for change in changes:
            assert neighbour._answer(msgspec.structs.replace(made.offer, **change), os.getpid(), 64) is None
        assert neighbour._answer(made.offer, 2**22, 64) is None  # no such process
        del whole, made
    assert files() == before


@needs_lab
def test_who_has_a_network_of_its_own_is_elsewhere() -> None:
    """The workers of a lab are on one machine, and must not go round its slow links."""
    code = "from paceline.neighbour import place; print(place())"
    told = [
        subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        for prefix in ([], ["unshare", "--net"])
    ]
    assert told[0] == place()
    assert told[1] not in ("", place())


@contextmanager
def beside() -> Iterator[tuple[Neighbour, int]]:
    """A child process that sleeps, as a neighbour; with its id."""
    child = subprocess.Popen(["sleep", "60"])
    try:
        with ExitStack() as stack:
            made = neighbour._make(64, stack)
            assert made is not None
            other = neighbour._greet(made, child.pid)
            assert other is not None
            yield other, child.pid
    finally:
        child.kill()
        child.wait()


def test_who_has_ended_is_not_waited_for() -> None:
    with beside() as (other, pid):
        assert not other.heard(0.01)
        ringing = Ringing(other)
        with pytest.raises(RuntimeError, match="Timed out"):
            ringing.wait(timedelta(seconds=0.01))
        assert not ringing.is_completed()
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="has ended"):
                ringing.wait(timedelta(seconds=60))
            assert ringing.is_completed()
        assert time.monotonic() - began < 30  # far less than it would have waited


def test_who_rang_before_it_ended_is_heard() -> None:
    with ExitStack() as stack:
        made = neighbour._make(64, stack)
        assert made is not None
        child = subprocess.Popen(["true"])
        here = neighbour._greet(made, child.pid)
        there = neighbour._answer(made.offer, os.getpid(), 64)
        assert here is not None
        assert there is not None
        there.ring()
        child.wait()
        assert here.heard(10.0)
        with pytest.raises(RuntimeError, match="has ended"):
            here.heard(10.0)


def test_a_bell_that_nobody_hears_can_be_rung() -> None:
    """Whether the other has ended or dropped what is shared: it is the wait that says so."""
    with ExitStack() as stack:
        made = neighbour._make(64, stack)
        assert made is not None
        here, there = neighbour._greet(made, os.getpid()), neighbour._answer(made.offer, os.getpid(), 64)
        assert here is not None
        assert there is not None
    del there
    here.ring()
    with pytest.raises(RuntimeError, match="has ended"):
        here.heard(10.0)
