"""Where workers tell how far they are."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Sequence
from multiprocessing import connection
from typing import NamedTuple

import msgspec

__all__ = ["Call", "Desk", "Message"]


class Message(msgspec.Struct, frozen=True):
    """What a worker tells: the step and stage that it has come to, or the digest of its model."""

    worker: int
    step: int = -1
    stage: str = ""
    digest: str | None = None


class Call(NamedTuple):
    """A message, and the worker that waits for an answer to it."""

    message: Message
    caller: socket.socket

    def answer(self) -> None:
        """Let the worker go on, if it still lives."""
        with self.caller, contextlib.suppress(OSError):
            self.caller.send(b"go on")


class Desk:
    """A socket that workers find by its path, in whatever network they are."""

    def __init__(self) -> None:
        # Not in a folder of the test: the path of a socket must be short.
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-")
        self.path = f"{self._folder.name}/desk"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._callers: list[socket.socket] = []

    def hear(self, sentinels: Sequence[int], seconds: float) -> list[Call]:
        """Wait so long, or until a worker calls or one of the sentinels is ready; what the callers say."""
        calls: list[Call] = []
        for ready in connection.wait([self._listener, *self._callers, *sentinels], seconds):
            if ready is self._listener:
                self._callers.append(self._listener.accept()[0])
            elif isinstance(ready, socket.socket):
                self._callers.remove(ready)
                # A worker that was killed meanwhile says nothing, or resets the connection.
                with contextlib.suppress(OSError):
                    if blob := ready.recv(4096):
                        calls.append(Call(msgspec.json.decode(blob, type=Message), ready))
                        continue
                ready.close()
        return calls

    def close(self) -> None:
        """Hang up."""
        for one in (self._listener, *self._callers):
            one.close()
        self._folder.cleanup()
