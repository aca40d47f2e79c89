"""torch: DistributedDataParallel, as it is or with half-precision gradients on the wire (argument ``fp16``)."""

from __future__ import annotations

import sys

import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contestants.job import Job, leave_group
from benchmarks.contestants.race import Race


def main() -> None:
    job = Job.from_command_line()
    dist.init_process_group("gloo")
    model = job.model()
    ddp = DistributedDataParallel(model)
    if "fp16" in sys.argv[2:]:
        ddp.register_comm_hook(None, fp16_compress_hook)
    optimizer = job.optimizer(model.parameters())
    for x, y in Race(job, model, lockstep=1):
        optimizer.zero_grad()
        F.cross_entropy(ddp(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    leave_group()


if __name__ == "__main__":
    main()
