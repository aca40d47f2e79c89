"""What a worker of ``survive.py`` does, in all its lives: train under Gossip until all together have done enough."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

import paceline as pl
from benchmarks.contestants.network import own_address
from benchmarks.training import factor
from benchmarks.victims import mark_training
from paceline import record, tasks
from paceline.tasks import Task

__all__ = ["LIMIT", "Job", "events_of", "model_of", "reached", "train"]

EVERY = 4  # steps from one exchange to the next
EACH = 32  # examples of a worker in a step
SAVED = 5.0  # seconds between two checkpoints
LIMIT = 120.0  # seconds to begin, to come back, and to end: the deadline of the run


class Job(NamedTuple):
    """The same for all workers."""

    task: str
    model: str | None
    epochs: float
    """Passes over the training set that all together do, dead or alive."""
    lr: float
    seed: int
    folder: str

    def load(self) -> Task:
        """Its data."""
        return tasks.load(self.task)


def train(job: Job) -> None:
    """One life."""
    torch.set_num_threads(1)
    rank, workers, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(job.folder)
    task = job.load()
    model = task.model(job.model, seed=job.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr, momentum=0.9)
    total, percent, saves = round(job.epochs * len(task.train)), -1, folder / "saves"
    with pl.Run(
        model,
        optimizer,
        task.train,
        batch=EACH * workers,
        sync=pl.sync.Gossip(EVERY, bind=own_address(), invitation=folder / "invitation"),
        record=[record.JsonLines(events_of(folder, rank))],
        checkpoint=pl.Checkpoint(saves, seconds=SAVED, keep=2),
        deadline=LIMIT,
        seed=job.seed,
    ) as run:
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda _: factor(min(1.0, run.progress.examples / total))
        )
        run.resume(saves, missing_ok=True)
        for step in run.steps(examples=total):
            optimizer.zero_grad()
            for examples in step:
                step.backward(task.loss(model, examples))
            optimizer.step()
            schedule.step()
            if percent < 0:
                mark_training(folder)
            while percent < min(100, 100 * run.progress.examples // total):
                percent += 1
                reached(folder, percent).touch()
        torch.save(model.state_dict(), model_of(folder, rank))


def events_of(folder: Path, rank: int) -> Path:
    """Where a worker records."""
    return folder / f"events-{rank}.jsonl"


def model_of(folder: Path, rank: int) -> Path:
    """Where a worker leaves its final model."""
    return folder / f"model-{rank}.pt"


def reached(folder: Path, percent: int) -> Path:
    """A file that is there when all together have used so many percent of the examples, as far as one has heard."""
    return folder / f"reached-{percent}"
