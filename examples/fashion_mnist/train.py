"""Fashion-MNIST with Paceline: the same training, alone or with any number of workers.

paceline run --workers 4 examples/fashion_mnist/train.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import Subset

import paceline as pl
from paceline import tasks

BATCH = 64  # examples in a step, all workers together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--limit", type=int, default=60_000, help="training examples to use")
    chosen = parser.parse_args()

    task = tasks.load("fashion-mnist")
    dataset = Subset(task.train, range(min(chosen.limit, len(task.train))))
    model = task.model("lenet", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)

    with pl.Run(model, optimizer, dataset, batch=BATCH, stateful={"scheduler": scheduler}) as run:
        for step in run.steps(epochs=chosen.epochs):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if step.ends_epoch:
                scheduler.step()

        with run.consensus():
            if run.fleet.rank == 0:
                found = task.evaluate(model)
                print(f"test accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f}")


if __name__ == "__main__":
    main()
