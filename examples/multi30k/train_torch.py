"""English to German with plain torch: DistributedDataParallel, and a loss that is the mean over all words of a step.

torchrun --nproc-per-node 4 examples/multi30k/train_torch.py
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from paceline import tasks
from paceline.tasks.multi30k import PADDING

BATCH = 64  # captions in a step, all workers together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--limit", type=int, default=29_000, help="training examples to use")
    chosen = parser.parse_args()

    dist.init_process_group("gloo")
    task = tasks.load("multi30k")
    dataset = Subset(task.train, range(min(chosen.limit, len(task.train))))
    model = task.model("translator", seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ddp = DistributedDataParallel(model)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH // dist.get_world_size(), sampler=sampler)

    for epoch in range(chosen.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            words = (y != PADDING).sum()
            loss = F.cross_entropy(ddp(x).flatten(0, 1), y.flatten(), ignore_index=PADDING)  # the mean over words
            own = words.clone()
            dist.all_reduce(words)
            # DDP takes all workers for equal, and their captions are not equally long.
            (loss * own * dist.get_world_size() / words).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    if dist.get_rank() == 0:
        found = task.evaluate(model)
        print(f"test accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f}")
    del ddp  # if it were the last to hold the group, its end could wait for a thread that waits for Python's lock
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
