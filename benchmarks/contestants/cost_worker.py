"""A worker whose synchronisations are timed: it waits for orders, works one turn for each, and answers with seconds.

Between turns it sleeps, so that contestants of several environments can take turns on the same cores. Orders come as
lines on the standard input, answers go as JSON to a pipe of their own, since libraries print what they like.
"""

from __future__ import annotations

import json
import mmap
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contestants.job import Job

__all__ = ["Loss", "Start", "serve"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""From inputs and targets."""

# So small that weights hardly move: the model is trained afterwards.
PULL = 1e-5


def serve(job: Job, model: nn.Module, backward: Callable[[Loss], None], update: Callable[[], None]) -> None:
    """Obey until the orders end.

    ``backward`` makes the gradients of a loss on the next batch. ``update`` is the rest of a step, up to where the next
    one begins: the last one of ``every`` synchronises.
    """
    turns = _Turns(job, model, backward, update)
    with open(int(sys.argv[2]), "w", buffering=1) as answers:
        print(json.dumps({}), file=answers)
        rested, used = time.perf_counter(), time.process_time()
        for order in sys.stdin:
            idle = (time.process_time() - used) / (time.perf_counter() - rested)
            answer = {"cost": turns.cost, "train": turns.train}[order.strip()]()
            # Measured before the answer is sent: then it is somebody else's turn.
            rested, used = time.perf_counter(), time.process_time()
            print(json.dumps({**answer, "idle": idle}), file=answers)


class Start:
    """All workers go on together.

    Each counts its arrivals in a file that all have mapped, and looks for the others without sleeping: they go on
    within microseconds, and none has a core to wake.
    """

    def __init__(self, file: Path, rank: int) -> None:
        with file.open("r+b") as opened:
            self._arrivals = memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")
        self._rank = rank

    @staticmethod
    def prepare(file: Path, workers: int) -> None:
        """Make the file; before any worker begins."""
        file.write_bytes(bytes(8 * workers))

    def wait(self) -> None:
        """Until all are here."""
        self._arrivals[self._rank] += 1
        while min(self._arrivals) < self._arrivals[self._rank]:
            time.sleep(0)  # workers may have to share a core


class _Turns:
    def __init__(
        self, job: Job, model: nn.Module, backward: Callable[[Loss], None], update: Callable[[], None]
    ) -> None:
        self._model, self._backward, self._update = model, backward, update
        self._parameters = list(model.parameters())
        self._every, self._pull = job.settings.every, PULL * (1 + job.rank)
        self._start = Start(job.folder / "start", job.rank)

    def cost(self) -> dict[str, Any]:
        """One round of steps, each timed from when all workers have come to its update."""
        seconds, own = [], 0
        for at in range(self._every):
            self._backward(self._toy_loss)
            if at == 1:
                own = self._digest()  # workers have taken one step alone
            self._start.wait()
            began = time.perf_counter()
            self._update()
            seconds.append(time.perf_counter() - began)
        mean = sum(each.sum(dtype=torch.float64).item() for each in self._parameters)
        mean /= sum(each.numel() for each in self._parameters)
        # In the first half of a round caches and cores may still be cold.
        local = statistics.median(seconds[self._every // 2 : -1])
        found = {"synchronising": seconds[-1], "local": local, "seconds": seconds[-1] - local}
        return {**found, "own": own, "shared": self._digest(), "mean": mean / PULL}

    def train(self) -> dict[str, Any]:
        """Two rounds of real training."""
        self._start.wait()
        began = time.perf_counter()
        for _ in range(2 * self._every):
            self._backward(self._real_loss)
            self._update()
        seconds = (time.perf_counter() - began) / (2 * self._every)
        return {"seconds": seconds, "shared": self._digest()}

    def _toy_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Gives every number of the model a gradient, another one on every worker, for little work."""
        return self._pull * torch.stack([each.sum() for each in self._parameters]).sum()

    def _real_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self._model(x), y)

    def _digest(self) -> int:
        digest = 0
        for each in self._parameters:
            digest = zlib.crc32(each.detach().numpy().tobytes(), digest)
        return digest
