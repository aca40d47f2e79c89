"""accelerate: LocalSGD."""

from __future__ import annotations

import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD

from benchmarks.contestants.job import Job
from benchmarks.contestants.race import Race


def main() -> None:
    job = Job.from_command_line()
    accelerator = Accelerator(cpu=True)
    model = job.model()
    wrapped, optimizer = accelerator.prepare(model, job.optimizer(model.parameters()))
    every = job.settings.every
    with LocalSGD(accelerator=accelerator, model=wrapped, local_sgd_steps=every) as local_sgd:
        for x, y in Race(job, model, lockstep=every):
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(wrapped(x), y))
            optimizer.step()
            local_sgd.step()
    accelerator.end_training()


if __name__ == "__main__":
    main()
