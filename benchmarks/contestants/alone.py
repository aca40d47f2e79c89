"""No contestant: each worker trains for itself, without any communication. What all do so is what could be done."""

from __future__ import annotations

import torch.nn.functional as F

from benchmarks.contestants.job import Job
from benchmarks.contestants.race import Race


def main() -> None:
    job = Job.from_command_line()
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for x, y in Race(job, model, lockstep=None):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


if __name__ == "__main__":
    main()
