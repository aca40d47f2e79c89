"""torch: PostLocalSGDOptimizer with a PeriodicModelAverager, on the bare model as in the contest."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from benchmarks.contestants.cost_worker import Loss, serve
from benchmarks.contestants.job import Job


def main() -> None:
    job = Job.from_command_line()
    dist.init_process_group("gloo")
    model = job.model()
    every = job.settings.every
    # It averages after the first step that is no warm-up: this makes that the last one of a round.
    averager = PeriodicModelAverager(period=every, warmup_steps=every - 1)
    optimizer = PostLocalSGDOptimizer(job.optimizer(model.parameters()), averager)
    batches = job.batches()

    def backward(loss: Loss) -> None:
        optimizer.zero_grad()
        loss(*next(batches)).backward()  # type: ignore[no-untyped-call]

    serve(job, model, backward, optimizer.step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
