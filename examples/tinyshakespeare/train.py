"""A language model of characters with Paceline: batches in pieces are one argument, clipping and schedule stay.

paceline run --workers 4 examples/tinyshakespeare/train.py
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch.utils.data import Subset

import paceline as pl
from paceline import tasks

BATCH = 64  # pieces of text in a step, all workers together
MICRO = 8  # in one forward pass: as many as fit into the memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--limit", type=int, default=15_685, help="training examples to use")
    chosen = parser.parse_args()

    task = tasks.load("tinyshakespeare")
    dataset = Subset(task.train, range(min(chosen.limit, len(task.train))))
    model = task.model("transformer", seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    steps = chosen.epochs * math.ceil(len(dataset) / BATCH)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    with pl.Run(model, optimizer, dataset, batch=BATCH, micro=MICRO, stateful={"scheduler": scheduler}) as run:
        for step in run.steps(epochs=chosen.epochs):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

        with run.consensus():
            if run.fleet.rank == 0:
                found = task.evaluate(model)
                print(f"test accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f}")


if __name__ == "__main__":
    main()
