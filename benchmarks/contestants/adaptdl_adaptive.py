"""AdaptDL: a batch that grows with the gradient noise, the same for all workers."""

from __future__ import annotations

import os
from collections.abc import Sequence

import adaptdl.torch
import portpicker
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.contestants.job import Job
from benchmarks.contestants.network import meeting_place
from benchmarks.contestants.race import Race

GROWTH = 4  # the largest batch, as a multiple of the first
FOREVER = 10**9


class Examples(Dataset[tuple[Tensor, Tensor]]):
    """All examples; a batch is picked at once, since the other contestants need not collate single ones either."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitems__(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch of these examples."""
        return self.x[ids], self.y[ids]


def join(job: Job) -> None:
    """Form the group, by the variables that AdaptDL's scheduler would set."""
    meeting = meeting_place()
    if job.rank == 0:
        meeting.set("port", str(portpicker.pick_unused_port()))
    os.environ.update(
        ADAPTDL_MASTER_ADDR=os.environ["MASTER_ADDR"],
        ADAPTDL_MASTER_PORT=meeting.get("port").decode(),
        ADAPTDL_REPLICA_RANK=str(job.rank),
        ADAPTDL_NUM_REPLICAS=str(job.workers),
    )
    adaptdl.torch.init_process_group("gloo")


def main() -> None:
    job = Job.from_command_line()
    join(job)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    everybody = job.settings.batch * job.workers
    loader = adaptdl.torch.AdaptiveDataLoader(
        Examples(job.x, job.y), batch_size=everybody, shuffle=True, collate_fn=lambda batch: batch
    )
    # The upper bound of a worker's batch must not be below the first batch of all workers.
    bounds = (job.settings.batch, job.settings.batch * max(GROWTH, job.workers))
    loader.autoscale_batch_size(GROWTH * everybody, local_bsz_bounds=bounds)
    wrapped = adaptdl.torch.AdaptiveDataParallel(model, optimizer)
    race = Race(job, model, lockstep=1)
    race.start()
    for _ in adaptdl.torch.remaining_epochs_until(FOREVER):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if race.step(len(y)):
                return


if __name__ == "__main__":
    main()
