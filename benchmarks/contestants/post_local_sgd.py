"""torch: PostLocalSGDOptimizer with a PeriodicModelAverager.

The documentation wraps the model in DDP with a hook that averages gradients for some first steps. With no such steps
DDP would do nothing, so the bare model is trained.
"""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from benchmarks.contestants.job import Job, leave_group
from benchmarks.contestants.race import Race


def main() -> None:
    job = Job.from_command_line()
    dist.init_process_group("gloo")
    model = job.model()
    averager = PeriodicModelAverager(period=job.settings.every, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(job.optimizer(model.parameters()), averager)
    for x, y in Race(job, model, lockstep=job.settings.every):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()  # type: ignore[no-untyped-call]
    leave_group()


if __name__ == "__main__":
    main()
