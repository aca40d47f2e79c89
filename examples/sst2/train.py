"""Good or bad film reviews with Paceline: batch and learning rate follow the noise of the gradient.

paceline run --workers 4 examples/sst2/train.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import Subset

import paceline as pl
from paceline import tasks

BATCH = 64  # examples in the first step, all workers together
MICRO = 8  # in one forward pass: what is compared to find the noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--limit", type=int, default=60_614, help="training examples to use")
    parser.add_argument("--largest", type=int, default=1024, help="batch")
    chosen = parser.parse_args()

    task = tasks.load("sst2")
    dataset = Subset(task.train, range(min(chosen.limit, len(task.train))))
    model = task.model("mean", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    batch = pl.batch.NormTest(start=BATCH, limit=chosen.largest, eta=0.7)
    lr = pl.lr.AdaScale(base=BATCH)

    with pl.Run(model, optimizer, dataset, batch=batch, lr=lr, micro=MICRO) as run:
        for step in run.steps(epochs=chosen.epochs):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()

        with run.consensus():
            if run.fleet.rank == 0:
                found = task.evaluate(model)
                print(f"test accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f}")
                print(f"{run.progress.step} steps of {run.progress.examples / run.progress.step:.0f} examples")


if __name__ == "__main__":
    main()
