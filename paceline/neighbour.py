"""Two workers of one machine: memory that both see, and a bell for each."""

from __future__ import annotations

import mmap
import os
import secrets
import select
import time
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.group import Group

__all__ = ["Neighbour", "place"]

WHAT = "the other to say whether it shares memory with this one"
ALERT = 1e-4  # seconds in which a worker looks again and again whether the bell rings, before it sleeps


class Address(msgspec.Struct, frozen=True):
    """Where a worker is."""

    place: str
    """Empty if it cannot share anything."""
    process: int


class Offer(msgspec.Struct, frozen=True):
    """Where rank 0 has memory and both bells, as numbers of open files; ``memory`` is -1 if it has none."""

    memory: int = -1
    bells: tuple[int, int] = (-1, -1)
    token: str = ""


class Neighbour:
    """The other worker. Nothing of what both share has a name in a file system: it goes with the last of them."""

    def __init__(self, memory: mmap.mmap, ring: int, hear: int, process: int) -> None:
        """The open files are copied."""
        self.memory = memory
        kept: list[int] = []
        weakref.finalize(self, _close, kept)
        kept.extend(map(os.dup, (ring, hear, process)))
        self._ring, self._hear, ended = kept
        self._poll = select.poll()
        self._poll.register(self._hear, select.POLLIN)
        self._poll.register(ended, select.POLLIN)

    @classmethod
    def meet(cls, group: Group, size: int, able: bool = True) -> Neighbour | None:
        """Share so many bytes, zeros at first; None if the other is elsewhere, or one of both is not ``able`` to.

        Both workers of the group must call it.
        """
        own = Address(place() if able else "", os.getpid())
        first, second = (msgspec.json.decode(one, type=Address) for one in group.gather(msgspec.json.encode(own), WHAT))
        if not first.place or first.place != second.place:
            return None
        with ExitStack() as stack:
            made = _make(size, stack) if group.rank == 0 else None
            told = group.gather(msgspec.json.encode(made.offer if made is not None else Offer()), WHAT)
            offer = msgspec.json.decode(told[0], type=Offer)
            found: Neighbour | None = None
            if offer.memory >= 0:
                found = _greet(made, second.process) if made is not None else _answer(offer, first.process, size)
            both = group.gather(b"yes" if found is not None else b"no", WHAT)
            return found if both == [b"yes", b"yes"] else None

    def ring(self) -> None:
        """Ring the other's bell."""
        os.write(self._ring, b".")

    def heard(self, seconds: float) -> bool:
        """Wait until the bell rings here, not longer than this; an error if it cannot ring any more."""
        alert = time.perf_counter() + min(ALERT, seconds)
        while not (events := self._poll.poll(0)) and time.perf_counter() < alert:
            pass
        events = events or self._poll.poll(1e3 * seconds)
        if any(opened == self._hear and event & select.POLLIN for opened, event in events):
            os.read(self._hear, 1)
            return True
        if events:
            raise RuntimeError("Connection closed by peer: the other worker of this machine has ended")
        return False


class Ringing:
    """Waiting for the bell, as one waits for a collective."""

    def __init__(self, neighbour: Neighbour) -> None:
        self._neighbour = neighbour
        self._heard = False
        self._ended: RuntimeError | None = None

    def wait(self, timeout: timedelta) -> bool:
        """Raises an error if it takes longer, or has become impossible."""
        if self._ended is not None:
            raise self._ended
        if not self._heard:
            try:
                self._heard = self._neighbour.heard(timeout.total_seconds())
            except RuntimeError as error:
                self._ended = error
                raise
        if not self._heard:
            raise RuntimeError("Timed out waiting for the other worker of this machine")
        return True

    def is_completed(self) -> bool:
        """Whether there is no more to wait for."""
        return self._heard or self._ended is not None


class _Made(NamedTuple):
    """What rank 0 has made for both."""

    offer: Offer
    memory: mmap.mmap
    ring: int
    hear: int


def _make(size: int, stack: ExitStack) -> _Made | None:
    """Memory and bells, open as long as the stack is; None where they cannot be had."""
    token = secrets.token_bytes(16)
    try:
        opened = os.memfd_create("paceline", os.MFD_CLOEXEC)
        stack.callback(os.close, opened)
        os.ftruncate(opened, size + len(token))
        memory = mmap.mmap(opened, size + len(token))
        bells = []
        for _ in range(2):
            bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            stack.callback(_close, bell)
            bells.append(bell)
    except (AttributeError, OSError):  # not Linux, or not allowed
        return None
    memory[size:] = token
    (hear, ring_back), (hear_there, ring) = bells
    return _Made(Offer(opened, (hear_there, ring_back), token.hex()), memory, ring, hear)


def _greet(made: _Made, process: int) -> Neighbour | None:
    """The other worker, as rank 0 sees it."""
    with ExitStack() as stack:
        try:
            ring = _reach(os.getpid(), made.ring, os.O_RDWR, stack)
            return Neighbour(made.memory, ring, made.hear, _end_of(process, stack))
        except (AttributeError, OSError):  # an old system
            return None


def _answer(offer: Offer, process: int, size: int) -> Neighbour | None:
    """The other worker, as rank 1 sees it; None if what it offers cannot be had."""
    token = bytes.fromhex(offer.token)
    with ExitStack() as stack:
        try:
            memory = mmap.mmap(_reach(process, offer.memory, os.O_RDWR, stack), size + len(token))
            if memory[size:] != token:  # another file that has the same number there
                return None
            hear = _reach(process, offer.bells[0], os.O_RDONLY, stack)
            ring = _reach(process, offer.bells[1], os.O_RDWR, stack)
            return Neighbour(memory, ring, hear, _end_of(process, stack))
        except (AttributeError, OSError, ValueError):  # another user's, or an old system
            return None


def _reach(process: int, number: int, way: int, stack: ExitStack) -> int:
    """Open what another process has open, as long as the stack is.

    A bell that is rung is opened for reading, too: then it can be rung when nobody hears it any more.
    """
    opened = os.open(f"/proc/{process}/fd/{number}", way | os.O_CLOEXEC | os.O_NONBLOCK)
    stack.callback(os.close, opened)
    return opened


def _end_of(process: int, stack: ExitStack) -> int:
    """An open file that can be read when a process has ended; open as long as the stack is."""
    opened = os.pidfd_open(process)
    stack.callback(os.close, opened)
    return opened


def place() -> str:
    """The same text for all processes that see each other's memory and network; empty where there is no such thing.

    Processes of one machine that have networks of their own are apart, as containers are, and the workers of a lab.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{space}") for space in ("net", "pid"))])
    except OSError:  # not Linux
        return ""


def _close(opened: Iterable[int]) -> None:
    for one in opened:
        os.close(one)
