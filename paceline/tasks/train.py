"""Train a built-in task with all workers: what ``paceline demo`` runs, and an example of a training script.

    paceline run --workers 4 -m paceline.tasks.train --task digits --epochs 20 --folder runs/digits

Stopped by Ctrl-C or a power cut, the same command goes on where the last checkpoint was written.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

import paceline as pl
from paceline import tasks

__all__ = ["BATCH", "device", "main", "train"]

BATCH = 64  # examples in a step, all workers together


def train(task: tasks.Task, epochs: int, folder: Path) -> None:
    """The whole of it: an ordinary loop, in which ``Run`` deals out the examples and averages the gradients."""
    model = task.model().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    run = pl.Run(
        model,
        optimizer,
        task.train,
        batch=BATCH,
        record=folder,
        checkpoint=pl.Checkpoint(folder / "checkpoints", seconds=30),
    )
    with run:
        run.resume(folder / "checkpoints", missing_ok=True)
        for step in run.steps(epochs=epochs):
            optimizer.zero_grad()
            for batch in step:
                step.backward(task.loss(model, batch), weight=task.weight(batch))
            optimizer.step()
            if step.ends_epoch:
                with run.consensus():
                    found = task.evaluate(model)
                run.log(**{f"test_{name}": value for name, value in found.items()})
        run.save(folder / "checkpoints" / f"step-{run.progress.step:08d}.ckpt")


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(prog="python -m paceline.tasks.train", description=__doc__)
    parser.add_argument("--task", default="digits", help=", ".join(tasks.names()))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--folder", type=Path, required=True, help="for records and checkpoints")
    chosen = parser.parse_args()
    train(tasks.load(chosen.task), chosen.epochs, chosen.folder)


def device() -> torch.device:
    """This worker's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(own)
    return own


if __name__ == "__main__":
    main()
