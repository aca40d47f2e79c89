"""Handwritten digits with Lightning Fabric for device and precision, and Paceline for all that concerns workers.

Fabric is made for one device in each process, and moves the model there; autocast is its context. Its wrappers stay
out: with mixed precision a model from fabric.setup wants fabric.backward, and would refuse step.backward; the loader
is Paceline's. "16-mixed" has a scaler: give it to Run as well, as docs/loop.md tells.

It needs lightning-fabric: pip install 'paceline[examples]'

paceline run --workers 4 examples/fabric/train.py
"""

import argparse

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch.utils.data import Subset

import paceline as pl
from paceline import tasks

BATCH = 64  # examples in a step, all workers together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--limit", type=int, default=1_437, help="training examples to use")
    parser.add_argument("--precision", default="bf16-mixed", help="as Fabric calls it")
    chosen = parser.parse_args()

    fabric = Fabric(accelerator="cpu", devices=1, precision=chosen.precision)
    task = tasks.load("digits")
    dataset = Subset(task.train, range(min(chosen.limit, len(task.train))))
    model = fabric.to_device(task.model("lenet", seed=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    with pl.Run(model, optimizer, dataset, batch=BATCH) as run:
        for step in run.steps(epochs=chosen.epochs):
            optimizer.zero_grad()
            for x, y in step:
                with fabric.autocast():
                    logits = model(x)
                step.backward(F.cross_entropy(logits.float(), y))
            optimizer.step()

        with run.consensus(), fabric.autocast():
            if run.fleet.rank == 0:
                found = task.evaluate(model)
                print(f"test accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f}")


if __name__ == "__main__":
    main()
