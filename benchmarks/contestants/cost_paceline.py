"""Paceline: LocalSGD, or AllReduce with a batch that is fixed or tested (argument ``fixed`` or ``norm-test``).

What a run learns from a round when the next step begins counts as well.
"""

from __future__ import annotations

import sys
from collections.abc import Generator

from torch.utils.data import TensorDataset

import paceline as pl
from benchmarks.contestants.cost_worker import Loss, serve
from benchmarks.contestants.job import Job
from paceline.roles import Batch

FOREVER = 10**9


def main() -> None:
    job = Job.from_command_line()
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    size = job.settings.batch * job.workers
    batch: int | Batch = size
    if "norm-test" in sys.argv:
        batch = pl.batch.NormTest(start=size, limit=size, eta=0.5)  # tested in every step, and as large as ever
    sync = pl.sync.AllReduce() if sys.argv[3:] else pl.sync.LocalSGD(every=job.settings.every)
    with pl.Run(model, optimizer, TensorDataset(job.x, job.y), batch=batch, sync=sync) as run:
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
