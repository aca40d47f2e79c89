"""torch: DistributedDataParallel."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contestants.cost_worker import Loss, serve
from benchmarks.contestants.job import Job


def main() -> None:
    job = Job.from_command_line()
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(job.model())
    optimizer = job.optimizer(wrapped.parameters())
    batches = job.batches()

    def backward(loss: Loss) -> None:
        optimizer.zero_grad()
        loss(*next(batches)).backward()  # type: ignore[no-untyped-call]

    serve(job, wrapped, backward, optimizer.step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
