"""The job of the contest, as one worker sees it: settings, data, model, optimizer.

Everything comes from files that ``contest.py`` has prepared, so that it is the same for all contestants.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Job", "Settings", "build", "leave_group"]

# Loaded by its path: `import paceline` would need dependencies that a peer's environment does not have.
MODELS = Path(__file__).parents[2] / "paceline" / "tasks" / "models.py"


@dataclass(frozen=True)
class Settings:
    """What ``settings.json`` in a job folder says."""

    model: str
    """A class of ``paceline/tasks/models.py``."""
    arguments: list[Any]
    """What it is made with."""
    data: str
    """File with the inputs and targets of the training set."""
    initial: str
    """File with the weights that everybody begins with."""
    batch: int
    """Examples of one worker in one step."""
    lr: float
    momentum: float
    every: int
    """Local steps between two averages (H), for those that have such a thing."""
    seconds: float
    """Training ends when the clock has passed this."""
    snapshot_every: int
    """Steps between the first snapshots."""
    seed: int = 0
    lost: int | None = None
    """The rank of the worker that is killed on the way; rank 0, where the others meet, is not."""
    lost_at: float = 0.0
    """Seconds of training before that."""

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """The settings of a job folder."""
        return cls(**json.loads((folder / "settings.json").read_text()))

    def write(self, folder: Path) -> None:
        """Put them into a job folder."""
        (folder / "settings.json").write_text(json.dumps(asdict(self), indent=1))


def build(settings: Settings) -> nn.Module:
    """A model of the job's class, with any weights."""
    spec = importlib.util.spec_from_file_location("contest_models", MODELS)
    assert spec is not None
    assert spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    model = getattr(models, settings.model)(*settings.arguments)
    assert isinstance(model, nn.Module)
    return model


def leave_group() -> None:
    """End torch's process group when all have come to the end.

    Whose connections close while the others still work may make gloo's threads abort the process (seen once with DDP).
    """
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class Job:
    """The job, opened by one worker; ``rank`` and ``workers`` are from the launcher's environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = Settings.read(folder)
        self.rank, self.workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.batch = self.settings.batch * self.workers
        """Examples of all workers in one step."""
        # Mapped, so that the workers of one machine share one copy.
        self.x, self.y = torch.load(self.settings.data, mmap=True, weights_only=True)

    @classmethod
    def from_command_line(cls) -> Job:
        """The job whose folder is the first argument of the script."""
        return cls(Path(sys.argv[1]))

    def model(self) -> nn.Module:
        """The model with the weights that everybody begins with."""
        model = build(self.settings)
        model.load_state_dict(torch.load(self.settings.initial, weights_only=True))
        return model

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.SGD:
        """The optimizer that everybody uses."""
        return torch.optim.SGD(parameters, lr=self.settings.lr, momentum=self.settings.momentum)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This worker's batches, without end.

        One order of all examples for each epoch, that of torch's ``DistributedSampler`` and of Paceline's ``Shuffle``;
        a step takes the next examples of it, a worker its part of them. What is left of an epoch is dropped.
        """
        batch, everybody = self.settings.batch, self.batch
        for epoch in range(sys.maxsize):
            generator = torch.Generator().manual_seed(self.settings.seed + epoch)
            order = torch.randperm(len(self.y), generator=generator)
            for start in range(self.rank * batch, len(order) // everybody * everybody, everybody):
                ids = order[start : start + batch]
                yield self.x[ids], self.y[ids]
