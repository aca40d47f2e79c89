"""Paceline: LocalSGD, or AllReduce with a batch that is fixed or tested (argument ``fixed`` or ``norm-test``).

With the argument ``pieces``, each worker does its share in four micro-batches.
What a run learns from a round when the next step begins counts as well.
"""

from __future__ import annotations

import sys
from collections.abc import Generator

from torch.utils.data import TensorDataset

import paceline as pl
from benchmarks.contestants.cost_worker import Loss, serve
from benchmarks.contestants.job import Job
from paceline.records import Progress
from paceline.roles import Batch

FOREVER = 10**9
PIECES = 4


class Same(pl.batch.NormTest):
    """Tested in every step, and as large as ever."""

    def size(self, progress: Progress) -> int:
        """The first one."""
        return self.start

    def due(self, progress: Progress) -> bool:
        """Always."""
        return True


def main() -> None:
    job = Job.from_command_line()
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    size = job.settings.batch * job.workers
    batch: int | Batch = size
    if "norm-test" in sys.argv:
        batch = Same(start=size, limit=2 * size, eta=0.5)
    sync = pl.sync.AllReduce() if sys.argv[3:] else pl.sync.LocalSGD(every=job.settings.every)
    micro = job.settings.batch // PIECES if "pieces" in sys.argv else None
    with pl.Run(model, optimizer, TensorDataset(job.x, job.y), batch=batch, sync=sync, micro=micro) as run:
        steps = run.steps(steps=FOREVER)
        step = next(steps)

        def backward(loss: Loss) -> None:
            optimizer.zero_grad()
            for x, y in step:
                step.backward(loss(x, y))

        def update() -> None:
            nonlocal step
            optimizer.step()
            step = next(steps)

        serve(job, model, backward, update)
        assert isinstance(steps, Generator)
        steps.close()


if __name__ == "__main__":
    main()
