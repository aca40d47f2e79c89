"""Good or bad film reviews with plain torch: DistributedDataParallel, and a batch that somebody has to know.

torchrun --nproc-per-node 4 examples/sst2/train_torch.py
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from paceline import tasks

BATCH = 64  # examples in a step, all workers together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--limit", type=int, default=60_614, help="training examples to use")
    chosen = parser.parse_args()

    dist.init_process_group("gloo")
    task = tasks.load("sst2")
    dataset = Subset(task.train, range(min(chosen.limit, len(task.train))))
    model = task.model("mean", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    ddp = DistributedDataParallel(model)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH // dist.get_world_size(), sampler=sampler)

    for epoch in range(chosen.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(ddp(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    if dist.get_rank() == 0:
        found = task.evaluate(model)
        print(f"test accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f}")
        print(f"{chosen.epochs * len(loader)} steps of {BATCH} examples")
    del ddp  # if it were the last to hold the group, its end could wait for a thread that waits for Python's lock
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
