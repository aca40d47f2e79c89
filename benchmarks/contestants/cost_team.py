"""The workers of one contestant whose synchronisations are timed: they wait for orders between their turns."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant
from benchmarks.contestants.bout import python_of
from benchmarks.contestants.cost_worker import Start
from benchmarks.contestants.job import Settings
from benchmarks.contestants.launch import ROOT, tail
from paceline.heap import keep_freed

__all__ = ["OUR_MODULE", "WORKERS", "Failed", "Team"]

WORKERS = 2
PATIENCE = 120.0  # seconds for one answer of all workers: the first one comes after imports and connections
OUR_MODULE = "benchmarks.contestants.cost_paceline"


class Failed(RuntimeError):
    """A contestant did not do what is measured; what it has measured means nothing."""


class Team:
    """The workers of one contestant, which sleep until they are given an order."""

    def __init__(self, contestant: Contestant, settings: Settings, folder: Path) -> None:
        self.title, self.ours = contestant.title, contestant.module == OUR_MODULE
        self._folder = folder
        folder.mkdir()
        settings.write(folder)
        Start.prepare(folder / "start", WORKERS)
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        variables = {
            "WORLD_SIZE": WORKERS,
            "LOCAL_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": max(1, (os.cpu_count() or 1) // WORKERS),
            "PYTHONPATH": ROOT,
            "PYTHONSAFEPATH": 1,
        }
        command = [str(python_of(contestant)), "-m", contestant.module, str(folder)]
        self._workers, self._answers = [], []
        for rank in range(WORKERS):
            reading, writing = os.pipe()
            told = {name: str(value) for name, value in variables.items()}
            environment = {**os.environ, **keep_freed(os.environ), **told, "RANK": str(rank)}
            with (folder / f"output-{rank}.txt").open("w") as output:
                worker = subprocess.Popen(
                    [*command, str(writing), *contestant.arguments],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=(writing,),
                )
            os.close(writing)
            self._workers.append(worker)
            self._answers.append(os.fdopen(reading))

    def answers(self) -> list[dict[str, Any]]:
        """Those of all workers to the last order; the first are given without one, when they are ready."""
        found: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, answers in enumerate(self._answers):
                selector.register(answers, selectors.EVENT_READ, rank)
            while len(found) < WORKERS:
                ready = selector.select(PATIENCE)
                if not ready:
                    raise Failed(f"{self.title}: no answer within {PATIENCE:g} s")
                for key, _ in ready:
                    line = self._answers[key.data].readline()
                    if not line:
                        raise Failed(f"{self.title}: rank {key.data} ended: {self._last_words(key.data)}")
                    found[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [found[rank] for rank in range(WORKERS)]

    def turn(self, order: str) -> list[dict[str, Any]]:
        """Let all workers do one turn, and wait until they sleep again."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{order}\n".encode())
            worker.stdin.flush()
        return self.answers()

    def part(self) -> None:
        """No more orders: all workers end, and must end well."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for rank, worker in enumerate(self._workers):
            if code := worker.wait(PATIENCE):
                raise Failed(f"{self.title}: rank {rank} ended with {code}: {self._last_words(rank)}")

    def kill(self) -> None:
        """End what still runs."""
        for worker, answers in zip(self._workers, self._answers, strict=True):
            worker.kill()
            worker.wait()
            answers.close()
            assert worker.stdin is not None
            worker.stdin.close()

    def _last_words(self, rank: int) -> str:
        return tail(self._folder / f"output-{rank}.txt", 8)
