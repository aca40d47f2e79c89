"""Decent-DP: gossip with one neighbour in every step, overlapped with the next step."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from decent_dp.ddp import DecentralizedDataParallel

from benchmarks.contestants.job import Job
from benchmarks.contestants.race import Race


def topology(workers: int) -> str:
    """The topology that mixes fastest for one message in a step, of those that this number of workers allows."""
    if workers & (workers - 1) == 0:
        return "one-peer-exp"
    return "complete" if workers % 2 else "ring"


def main() -> None:
    job = Job.from_command_line()
    dist.init_process_group("gloo")
    model = job.model()

    def optimizer(named: list[tuple[str, torch.Tensor]]) -> torch.optim.Optimizer:
        return job.optimizer([parameter for _, parameter in named])

    wrapped = DecentralizedDataParallel(model, optimizer, topology=topology(job.workers))
    # A worker waits for a message of the step before, and hears of rank 0 after as many steps as a message needs to
    # get from everybody to everybody: fewer than there are workers, and one more for the overlap.
    for x, y in Race(job, model, lockstep=job.workers + 1):
        loss = F.cross_entropy(wrapped(x), y)
        wrapped.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
