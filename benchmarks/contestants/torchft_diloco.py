"""torchft: DiLoCo, every worker a replica of its own, the whole model one fragment."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torchft.local_sgd import DiLoCo

from benchmarks.contestants.job import Job
from benchmarks.contestants.race import Race
from benchmarks.contestants.torchft_replica import replica


def main() -> None:
    job = Job.from_command_line()
    model = job.model()
    inner = job.optimizer(model.parameters())
    # Douillard et al. 2023, "DiLoCo": the best of the outer optimizers that they tried.
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    every = job.settings.every
    with (
        replica(job, {"model": model, "inner": inner}) as manager,
        DiLoCo(manager, [model], inner, outer, sync_every=every),
    ):
        for x, y in Race(job, model, lockstep=every):
            inner.zero_grad()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            inner.step()


if __name__ == "__main__":
    main()
