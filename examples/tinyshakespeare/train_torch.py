"""A language model of characters with plain torch: DistributedDataParallel, batches in pieces, clipping, a schedule.

torchrun --nproc-per-node 4 examples/tinyshakespeare/train_torch.py
"""

import argparse
import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from paceline import tasks

BATCH = 64  # pieces of text in a step, all workers together
MICRO = 8  # in one forward pass: as many as fit into the memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--limit", type=int, default=15_685, help="training examples to use")
    chosen = parser.parse_args()

    dist.init_process_group("gloo")
    task = tasks.load("tinyshakespeare")
    dataset = Subset(task.train, range(min(chosen.limit, len(task.train))))
    model = task.model("transformer", seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    steps = chosen.epochs * math.ceil(len(dataset) / BATCH)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    ddp = DistributedDataParallel(model)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH // dist.get_world_size(), sampler=sampler)

    for epoch in range(chosen.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            share = len(batch[0])
            pieces = list(zip(*(tensor.split(MICRO) for tensor in batch), strict=True))
            for number, (x, y) in enumerate(pieces, 1):
                with nullcontext() if number == len(pieces) else ddp.no_sync():  # the last one averages all
                    loss = F.cross_entropy(ddp(x).flatten(0, 1), y.flatten())
                    (loss * len(x) / share).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

    if dist.get_rank() == 0:
        found = task.evaluate(model)
        print(f"test accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f}")
    del ddp  # if it were the last to hold the group, its end could wait for a thread that waits for Python's lock
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
