"""CIFAR-10 with Paceline's local SGD: workers train alone, and average their models every few steps.

paceline run --workers 4 examples/cifar10/train.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import Subset

import paceline as pl
from paceline import tasks

BATCH = 128  # examples in a step, all workers together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--limit", type=int, default=50_000, help="training examples to use")
    # Longer rounds send less and cost accuracy: docs/local-sgd.md, "How long a round?".
    parser.add_argument("--every", type=int, default=4, help="steps from one average of the models to the next")
    chosen = parser.parse_args()

    task = tasks.load("cifar10")
    dataset = Subset(task.train, range(min(chosen.limit, len(task.train))))
    model = task.model("resnet", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=chosen.epochs)
    sync = pl.sync.LocalSGD(every=chosen.every)

    with pl.Run(model, optimizer, dataset, batch=BATCH, sync=sync, stateful={"scheduler": scheduler}) as run:
        for step in run.steps(epochs=chosen.epochs):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if step.ends_epoch:
                scheduler.step()
                with run.consensus():  # the average of all workers' models, also in the middle of a round
                    if run.fleet.rank == 0:
                        found = task.evaluate(model)
                        print(f"epoch {step.epoch}: test accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f}")


if __name__ == "__main__":
    main()
