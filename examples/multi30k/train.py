"""English to German with Paceline: a loss that is the mean over words says over how many.

paceline run --workers 4 examples/multi30k/train.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import Subset

import paceline as pl
from paceline import tasks
from paceline.tasks.multi30k import PADDING

BATCH = 64  # captions in a step, all workers together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--limit", type=int, default=29_000, help="training examples to use")
    chosen = parser.parse_args()

    task = tasks.load("multi30k")
    dataset = Subset(task.train, range(min(chosen.limit, len(task.train))))
    model = task.model("translator", seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with pl.Run(model, optimizer, dataset, batch=BATCH) as run:
        for step in run.steps(epochs=chosen.epochs):
            optimizer.zero_grad()
            for x, y in step:
                words = int((y != PADDING).sum())
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PADDING)  # the mean over words
                step.backward(loss, weight=words)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        with run.consensus():
            if run.fleet.rank == 0:
                found = task.evaluate(model)
                print(f"test accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f}")


if __name__ == "__main__":
    main()
