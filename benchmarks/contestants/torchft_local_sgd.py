"""torchft: LocalSGD, every worker a replica of its own."""

from __future__ import annotations

import torch.nn.functional as F
from torchft.local_sgd import LocalSGD

from benchmarks.contestants.job import Job
from benchmarks.contestants.race import Race
from benchmarks.contestants.torchft_replica import replica


def main() -> None:
    job = Job.from_command_line()
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    every = job.settings.every
    with (
        replica(job, {"model": model, "optimizer": optimizer}) as manager,
        LocalSGD(manager, model, optimizer, sync_every=every),
    ):
        for x, y in Race(job, model, lockstep=every):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


if __name__ == "__main__":
    main()
