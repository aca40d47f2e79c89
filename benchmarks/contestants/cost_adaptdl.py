"""AdaptDL with a batch that stays as it is: gradient noise is measured in every step all the same."""

from __future__ import annotations

import adaptdl.torch

from benchmarks.contestants.adaptdl_adaptive import FOREVER, Examples, join
from benchmarks.contestants.cost_worker import Loss, serve
from benchmarks.contestants.job import Job


def main() -> None:
    job = Job.from_command_line()
    join(job)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    loader = adaptdl.torch.AdaptiveDataLoader(
        Examples(job.x, job.y),
        batch_size=job.settings.batch * job.workers,
        shuffle=True,
        drop_last=True,
        collate_fn=lambda batch: batch,
    )
    wrapped = adaptdl.torch.AdaptiveDataParallel(model, optimizer)
    batches = (batch for _ in adaptdl.torch.remaining_epochs_until(FOREVER) for batch in loader)

    def backward(loss: Loss) -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        loss(x, y).backward()  # type: ignore[no-untyped-call]

    serve(job, wrapped, backward, optimizer.step)


if __name__ == "__main__":
    main()
