"""Two workers of one machine: memory that both see, and a bell for each."""

from __future__ import annotations

import mmap
import os
import secrets
import select
import time
import weakref
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.group import Group

__all__ = ["Neighbour", "place"]

WHAT = "the other to say whether it shares memory with this one"
ALERT = 1e-4  # seconds in which a worker looks again and again whether the bell rings, before it sleeps


class Offer(msgspec.Struct, frozen=True):
    """What a worker says of itself; rank 0 also says where its memory and both bells are."""

    place: str = ""
    process: int = 0
    memory: int = -1
    bells: tuple[int, int] = (-1, -1)
    token: str = ""


class Neighbour:
    """The other worker. Nothing of what both share has a name in a file system: it goes with the last of them."""

    def __init__(self, memory: mmap.mmap, ring: int, hear: int, process: int) -> None:
        self.memory = memory
        self._ring, self._hear = ring, hear
        self._poll = select.poll()
        self._poll.register(hear, select.POLLIN)
        self._poll.register(process, select.POLLIN)  # a process that has ended
        weakref.finalize(self, _close, ring, hear, process)

    @classmethod
    def meet(cls, group: Group, size: int, able: bool = True) -> Neighbour | None:
        """Share so many bytes, zeros at first; None if the other is elsewhere, or one of both is not ``able`` to.

        Both workers of the group must call it.
        """
        with ExitStack() as stack:
            made = _make(size, stack) if able and group.rank == 0 else None
            own = made.offer if made is not None else Offer(place() if able else "", os.getpid())
            told = group.gather(msgspec.json.encode(own), WHAT)
            first, second = (msgspec.json.decode(one, type=Offer) for one in told)
            found: Neighbour | None = None
            if first.memory >= 0 and first.place == second.place:
                found = _greet(made, second) if made is not None else _answer(first, size)
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
    token, here = secrets.token_bytes(16), place()
    try:
        opened = os.memfd_create("paceline", os.MFD_CLOEXEC)
        stack.callback(os.close, opened)
        os.posix_fallocate(opened, 0, size + len(token))  # so that it is refused now, not missed when it is used
        memory = mmap.mmap(opened, size + len(token))
        bells = []
        for _ in range(2):
            bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            stack.callback(_close, *bell)
            bells.append(bell)
    except (AttributeError, OSError):  # not Linux, not allowed, or no room
        return None
    memory[size:] = token
    (hear, ring_back), (hear_there, ring) = bells
    offer = Offer(here, os.getpid(), opened, (hear_there, ring_back), token.hex())
    return _Made(offer, memory, ring, hear) if here else None


def _greet(made: _Made, other: Offer) -> Neighbour | None:
    """The other worker, as rank 0 sees it."""
    try:
        process = os.pidfd_open(other.process)
    except (AttributeError, OSError):  # an old system
        return None
    return Neighbour(made.memory, os.dup(made.ring), os.dup(made.hear), process)


def _answer(offer: Offer, size: int) -> Neighbour | None:
    """The other worker, as rank 1 sees it; None if what it offers cannot be had."""
    token = bytes.fromhex(offer.token)
    with ExitStack() as stack:

        def reach(number: int, way: int) -> int:
            opened = os.open(f"/proc/{offer.process}/fd/{number}", way | os.O_CLOEXEC | os.O_NONBLOCK)
            stack.callback(os.close, opened)
            return opened

        try:
            memory = mmap.mmap(reach(offer.memory, os.O_RDWR), size + len(token))
            if memory[size:] != token:  # another file that has the same number there
                return None
            hear, ring = reach(offer.bells[0], os.O_RDONLY), reach(offer.bells[1], os.O_WRONLY)
            process = os.pidfd_open(offer.process)
        except (AttributeError, OSError, ValueError):  # another user's, or an old system
            return None
        return Neighbour(memory, os.dup(ring), os.dup(hear), process)


def place() -> str:
    """The same text for all processes that see each other's memory and network; empty where there is no such thing.

    Processes of one machine that have networks of their own are apart, as containers are, and the workers of a lab.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{space}") for space in ("net", "pid"))])
    except OSError:  # not Linux
        return ""


def _close(*opened: int) -> None:
    for one in opened:
        os.close(one)
