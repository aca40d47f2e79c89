"""accelerate: LocalSGD."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD

from benchmarks.contestants.cost_worker import Loss, serve
from benchmarks.contestants.job import Job


def main() -> None:
    job = Job.from_command_line()
    accelerator = Accelerator(cpu=True)
    model = job.model()
    wrapped, optimizer = accelerator.prepare(model, job.optimizer(model.parameters()))
    batches = job.batches()
    with LocalSGD(accelerator=accelerator, model=wrapped, local_sgd_steps=job.settings.every) as local_sgd:

        def backward(loss: Loss) -> None:
            optimizer.zero_grad()
            accelerator.backward(loss(*next(batches)))

        def update() -> None:
            optimizer.step()
            local_sgd.step()

        serve(job, wrapped, backward, update)
    accelerator.end_training()


if __name__ == "__main__":
    main()
