"""Where workers run: on this machine as it is, or in the lab."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from typing import Protocol

from paceline.errors import LabError
from paceline.lab import Cluster, Event, Lab
from paceline.testing import function
from paceline.testing.processes import Work, send

__all__ = ["InLab", "Loopback", "Place"]

TURN = 120.0  # seconds to wait for another lab of this machine to end


class Place(Protocol):
    """A place for so many workers, from :meth:`open` to :meth:`close`."""

    size: int
    cluster: Cluster | None

    def open(self) -> None:
        """Make it ready."""

    def close(self) -> None:
        """Leave nothing behind; may be called twice."""

    def environment(self, worker: int) -> dict[str, str]:
        """The variables that torchrun would set for a worker."""

    def enter(self, worker: int, work: Work) -> Work:
        """What has to be started for a worker to do this."""

    def send(self, worker: int, process: BaseProcess, number: signal.Signals) -> None:
        """Send a signal to all processes of a worker."""

    def change(self, event: Event) -> None:
        """Let something happen to a link or a processor."""


class Loopback:
    """This machine and its loopback network."""

    def __init__(self, size: int) -> None:
        self.cluster: Cluster | None = None
        self.size = size
        self._port = 0

    def open(self) -> None:
        """Find a port for the workers to meet at."""
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self._port = one.getsockname()[1]

    def close(self) -> None:
        """There is nothing to leave behind."""

    def environment(self, worker: int) -> dict[str, str]:
        """The variables that torchrun would set for a worker of one machine."""
        ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(worker))
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(self.size))
        return {
            **ranks,
            **sizes,
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def enter(self, worker: int, work: Work) -> Work:
        """All workers are here already."""
        return work

    def send(self, worker: int, process: BaseProcess, number: signal.Signals) -> None:
        """Send a signal to all processes of a worker."""
        send(process, number)

    def change(self, event: Event) -> None:
        """Nothing here can be changed."""
        raise AssertionError(f"{event} was not refused when it was declared")


class InLab:
    """A cluster of the lab, every worker a machine of its own."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster: Cluster | None = cluster
        self.size = len(cluster.workers)
        self._names = [worker.name for worker in cluster.workers]
        self._lab = Lab(cluster, "test")
        self._exits = ExitStack()

    def open(self) -> None:
        """Build the lab, when no other runs on this machine any more."""
        end = time.monotonic() + TURN
        while True:
            try:
                self._exits.enter_context(self._lab)
                return
            except LabError as error:
                if not isinstance(error.__context__, BlockingIOError):  # not because another one is running
                    raise
                if time.monotonic() > end:
                    raise LabError(f"{error} (a test has waited {TURN:g} s for its turn)") from None
                time.sleep(0.5)

    def close(self) -> None:
        """Take the lab down, with everything that runs in it."""
        self._exits.close()

    def environment(self, worker: int) -> dict[str, str]:
        """The variables that torchrun would set for a worker that has a machine to itself."""
        return self._lab.environment(self._names[worker])

    def enter(self, worker: int, work: Work) -> Work:
        """A command that enters the namespace and the control group of a worker."""
        words = work.args if work.job is None else function.command(work.job, work.args)
        return Work(None, tuple(self._lab.command(self._names[worker], words)))

    def send(self, worker: int, process: BaseProcess, number: signal.Signals) -> None:
        """Send a signal to all processes in the control group of a worker."""
        self._lab.send(self._names[worker], number)

    def change(self, event: Event) -> None:
        """Let something happen to a link or a processor."""
        self._lab.apply(event)
