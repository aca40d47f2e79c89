"""torchft: LocalSGD, every worker a replica of its own."""

from __future__ import annotations

from torchft.local_sgd import LocalSGD

from benchmarks.contestants.cost_worker import Loss, serve
from benchmarks.contestants.job import Job
from benchmarks.contestants.torchft_replica import replica


def main() -> None:
    job = Job.from_command_line()
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    batches = job.batches()

    def backward(loss: Loss) -> None:
        optimizer.zero_grad()
        loss(*next(batches)).backward()  # type: ignore[no-untyped-call]

    with (
        replica(job, {"model": model, "optimizer": optimizer}) as manager,
        LocalSGD(manager, model, optimizer, sync_every=job.settings.every),
    ):
        serve(job, model, backward, optimizer.step)


if __name__ == "__main__":
    main()
