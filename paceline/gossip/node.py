"""The thread beside the trainer: it moves letters between sockets and clerk, and never makes the trainer wait."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from paceline.errors import FleetError
from paceline.gossip.clerk import Clerk
from paceline.gossip.members import State
from paceline.gossip.sockets import Sockets
from paceline.gossip.wire import Card, decode, encode

__all__ = ["Node", "Sees"]

LETTERS = 16  # that are read before the clerk looks at the time again
LONGEST = 0.5  # seconds that the thread sleeps at most
FAREWELL = 5.0  # seconds until a thread that does not end is left alone: it is a daemon


class Sees(NamedTuple):
    """What the thread has heard of the others, for the trainer to read at any time."""

    others: int = 0
    """Examples that they have used."""
    members: int = 1
    """That take part, this worker included."""
    known: int = 1
    """That were ever heard of, this worker included."""
    over: bool = False
    """Whether one has come to the end."""


class Node:
    """Runs a clerk on sockets, in a thread of its own. The trainer uses :meth:`do`, :meth:`wait` and :attr:`sees`."""

    def __init__(self, clerk: Clerk, sockets: Sockets, card: Card) -> None:
        self.clerk = clerk
        self.sees = Sees()
        self._sockets, self._card = sockets, card
        self._calls: queue.SimpleQueue[Callable[[Clerk], None]] = queue.SimpleQueue()
        self._turn = threading.Condition()
        self._error: BaseException | None = None
        self._closing = False
        self._ear, self._bell = os.pipe()
        os.set_blocking(self._ear, False)
        os.set_blocking(self._bell, False)
        sockets.watch(self._ear)
        self._thread = threading.Thread(target=self._run, name="paceline-gossip", daemon=True)
        self._thread.start()

    def do(self, call: Callable[[Clerk], None], soon: bool = True) -> None:
        """Let the thread call this at once, or when it wakes up; raises what has ended the thread, if something has."""
        if self._error is not None:
            raise self._error
        self._calls.put(call)
        if soon:
            with suppress(BlockingIOError):  # then it rings already
                os.write(self._bell, b"!")

    def mark(self) -> Callable[[], bool]:
        """Says whether all that was told before has been done."""
        done: list[bool] = []
        self.do(lambda clerk: done.append(True))
        return lambda: bool(done)

    def wait(self, until: Callable[[Clerk], bool], seconds: float, what: Callable[[Clerk], str]) -> None:
        """Wait for the clerk, at most so long, then raise an error that says ``what`` was waited for."""
        if not self.wait_for(until, seconds):
            member = self.clerk.members.own.number
            raise FleetError(f"member {member} waited {seconds:g} s for {what(self.clerk)}, in vain")

    def wait_for(self, until: Callable[[Clerk], bool], seconds: float) -> bool:
        """Wait for the clerk, at most so long; whether it has come to that."""
        with self._turn:
            found = self._turn.wait_for(lambda: self._error is not None or until(self.clerk), seconds)
        if self._error is not None:
            raise self._error
        return found

    def close(self) -> None:
        """Say goodbye, and end the thread."""
        if self._closing:
            return
        self._closing = True
        if self._error is None:
            self.do(lambda clerk: clerk.leave())
        self._thread.join(FAREWELL)
        if not self._thread.is_alive():
            os.close(self._ear)
            os.close(self._bell)

    def _run(self) -> None:
        try:
            while not self._closing or not self._calls.empty():
                self._sockets.wait(min(self.clerk.due - time.monotonic(), LONGEST))
                with self._turn:  # who looks in between would see an exchange that has ended, and not what came of it
                    self._cycle()
                    self._look()
                    self._turn.notify_all()
        except BaseException as error:  # it belongs to the trainer
            with self._turn:
                self._error = error
                self._turn.notify_all()
        finally:
            self._sockets.close()

    def _cycle(self) -> None:
        clerk = self.clerk
        with suppress(BlockingIOError):
            os.read(self._ear, 4096)
        while not self._calls.empty():
            self._calls.get()(clerk)
        self._post()
        for _ in range(LETTERS):
            frames = self._sockets.receive()
            if frames is None:
                break
            clerk.counts.bytes_received += sum(map(len, frames))
            letter = decode(self._card, frames)
            if letter is None:
                clerk.counts.unheard += 1
                continue
            clerk.receive(letter, time.monotonic())
            self._post()
        clerk.tick(time.monotonic())
        self._post()

    def _look(self) -> None:
        members, counts = self.clerk.members, self.clerk.counts
        self.sees = Sees(members.elsewhere, len(members.participants()), members.known, self.clerk.over)
        counts.strangers = self._sockets.strangers
        if members.own.state is not State.JOINING:  # it talks to addresses of which it does not know whose they are
            self._sockets.keep(members.addresses)

    def _post(self) -> None:
        clerk = self.clerk
        outbox, clerk.outbox = clerk.outbox, []
        members = clerk.members
        for address, message, payload in outbox:
            header = encode(self._card, members.own, members.examples, members.news(), message, members.lost)
            frames = [header] if payload is None else [header, payload.numpy().tobytes()]
            if self._sockets.send(address, frames):
                clerk.counts.bytes_sent += sum(map(len, frames))
