"""Handwritten digits with Lightning Fabric, which does all: processes, devices, precision, loader, DDP.

It needs lightning-fabric: pip install 'paceline[examples]'

torchrun --nproc-per-node 4 examples/fabric/train_torch.py
"""

import argparse
import os

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, Subset

from paceline import tasks

BATCH = 64  # examples in a step, all workers together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--limit", type=int, default=1_437, help="training examples to use")
    parser.add_argument("--precision", default="bf16-mixed", help="as Fabric calls it")
    chosen = parser.parse_args()

    workers = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=workers, precision=chosen.precision)
    fabric.launch()
    task = tasks.load("digits")
    dataset = Subset(task.train, range(min(chosen.limit, len(task.train))))
    model = task.model("lenet", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    wrapped, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=BATCH // fabric.world_size, shuffle=True))

    for _ in range(chosen.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(wrapped(x), y))
            optimizer.step()

    if fabric.is_global_zero:
        found = task.evaluate(wrapped)
        print(f"test accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f}")


if __name__ == "__main__":
    main()
