"""The clock, the snapshots and the end of one worker's training: the same for all contestants.

Nothing of it goes over the network that is measured. The workers of a contest share the job folder, and meet there:
they start together when each has put up a file, and stop at the step that rank 0 writes into a file when its clock
has passed the limit. Who is to be killed does it itself, so that it happens at the same place of every contestant's
clock; a worker that is started again goes on with the clock of its life before.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from benchmarks.contestants.job import Job

__all__ = ["KILLED", "LIFE", "Race", "next_snapshot", "stop_step"]

KILLED = "killed"
"""The file in the job's folder that says that the worker was killed."""
LIFE = "CONTEST_LIFE"
"""Of the environment: how often all workers were started before."""


def next_snapshot(step: int, every: int) -> int:
    """The step of the snapshot after the one at ``step``: ``every`` later, and when they are many, 5 % later."""
    return step + max(every, step // 20)


def stop_step(step: int, lockstep: int) -> int:
    """The step at which all can stop together, if rank 0 has done ``step`` and decides now.

    Who has to wait for rank 0 once in ``lockstep`` steps cannot pass the second of these meetings from here before it
    has seen the decision.
    """
    return (step // lockstep + 2) * lockstep


class Race:
    """One worker's training: iterate over it for batches, or call :meth:`start` and, after each step, :meth:`step`.

    ``lockstep`` says that workers wait for each other once in so many steps; they then stop at the same step. With
    None each stops by its own clock.
    """

    def __init__(self, job: Job, model: nn.Module, *, lockstep: int | None) -> None:
        self.job, self.model, self.lockstep = job, model, lockstep
        self.steps = self.examples = 0
        self._life = int(os.environ.get(LIFE, "0"))
        self._folder = job.folder / "snapshots" / str(job.rank)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._killed = job.folder / KILLED
        self._stop_file = job.folder / "stop"
        self._stop_at: int | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.start()
        for x, y in self.job.batches():
            yield x, y
            if self.step(len(y)):
                return

    def start(self, steps: int | None = 0) -> None:
        """Wait until all workers are ready, and start the clock.

        Of what a worker has done in an earlier life so many steps still count; with None all that it has shown.
        """
        files = sorted(self._folder.glob("*.pt"))
        earlier = [torch.load(file, mmap=True, weights_only=True) for file in files]
        counted = [one for one in earlier if steps is None or one["step"] <= steps]
        self.examples = max((one["examples"] for one in counted), default=0)
        self.steps = max((one["step"] for one in counted), default=0) if steps is None else steps
        self._number, self._next = len(files), next_snapshot(self.steps, self.job.settings.snapshot_every)
        clock = self.job.folder / f"clock-{self.job.rank}"
        (self.job.folder / f"ready-{self.job.rank}").touch()
        waiting = [self.job.folder / f"ready-{rank}" for rank in range(self.job.workers)]
        while waiting := [file for file in waiting if not file.exists()]:
            time.sleep(0.005)
        if clock.exists():
            self._began = float(clock.read_text())
            return
        self._began = time.perf_counter()
        clock.write_text(repr(self._began))  # of the machine, not of this process

    @property
    def seconds(self) -> float:
        """The clock: time since the start, without that for snapshots."""
        return time.perf_counter() - self._began

    def step(self, examples: int) -> bool:
        """One optimizer step on so many examples was done; gives whether it was the last one."""
        self.steps += 1
        self.examples += examples
        self._be_killed()
        last = self._is_last()
        if last or self.steps == self._next:
            self._snapshot()
        return last

    def _be_killed(self) -> None:
        """With everything that this worker has started, but not with what has started it."""
        settings = self.job.settings
        if settings.lost == self.job.rank and self.seconds >= settings.lost_at and not self._killed.exists():
            self._killed.touch()
            os.killpg(0, signal.SIGKILL)

    def _is_last(self) -> bool:
        late = self.seconds >= self.job.settings.seconds
        if self.lockstep is None:
            return late
        if self._stop_at is None:
            if self.job.rank == 0 and late:
                part = self._stop_file.with_name("stop-part")
                part.write_text(str(stop_step(self.steps, self.lockstep)))
                os.replace(part, self._stop_file)
            if self._stop_file.exists():
                self._stop_at = int(self._stop_file.read_text())
        return self._stop_at is not None and self.steps >= self._stop_at

    def _snapshot(self) -> None:
        paused = time.perf_counter()
        what = {
            "step": self.steps,
            "examples": self.examples,
            "seconds": paused - self._began,
            "life": self._life,
            "together": self.lockstep is not None,
            "parameters": parameters_to_vector(self.model.parameters()).detach().cpu(),
        }
        torch.save(what, self._folder / f"{self._number:06d}.pt")
        self._number += 1
        self._next = next_snapshot(self.steps, self.job.settings.snapshot_every)
        self._began += time.perf_counter() - paused
