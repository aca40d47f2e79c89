"""Train a built-in task under a named setting: what ``paceline compare`` starts in every worker.

paceline run --workers 2 -m paceline.compare.train --setting local-sgd --epochs 5 --folder runs/mine
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import paceline as pl
from paceline import tasks
from paceline.compare.settings import SETTINGS
from paceline.roles import Unmet
from paceline.tasks.task import choose
from paceline.tasks.train import BATCH, device

__all__ = ["main", "train"]

BETWEEN = 8192  # examples between two evaluations at most; at most one epoch, too
ENDLESS = 10**9  # epochs: the clock ends the run


def train(
    task: tasks.Task, setting: str, *, seed: int, epochs: int | None, seconds: float | None, folder: Path
) -> None:
    """The loop of every contestant: the same model, data, optimizer and evaluation.

    ``seconds`` are those of training: where all workers stand still for an evaluation, its time does not count, and the
    record says how long it was. Under Gossip rank 0 alone evaluates, the others go on, and so does the clock.
    """
    where = device()
    model = task.model(seed=seed).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    roles = {"batch": BATCH, **choose("setting", setting, SETTINGS)()}
    every = min(len(task.train), BETWEEN)
    torch.manual_seed(seed)
    with pl.Run(model, optimizer, task.train, seed=seed, record=folder, **roles) as run:
        began, due, evaluated = time.monotonic(), every, -1
        for step in run.steps(epochs=epochs if seconds is None else ENDLESS):
            optimizer.zero_grad()
            for batch in step:
                step.backward(task.loss(model, batch), weight=task.weight(batch))
            optimizer.step()
            # Only where a round ends: there, all workers that wait for each other are at the same step.
            if step.round is not None and run.progress.examples >= due:
                due = run.progress.examples // every * every + every
                began += _evaluate(run, task)
                evaluated = run.progress.step
            if seconds is not None and time.monotonic() - began >= seconds:
                run.stop()
        if evaluated != run.progress.step and run.fleet.rank == 0:
            run.log(**_found(task, model))  # after the loop, the model is everybody's


def _evaluate(run: pl.Run, task: tasks.Task) -> float:
    """Try the average model on the test set; gives the seconds for which all workers have stood still."""
    if isinstance(run.sync, Unmet):
        if run.fleet.rank == 0:
            with run.consensus():
                found = _found(task, run.model)
            run.log(**found)
        return 0.0
    began = time.monotonic()
    with run.consensus():
        found = _found(task, run.model) if run.fleet.rank == 0 else {}
        run.fleet.gather(b"", "rank 0 to evaluate")  # or the others would go on, and seem to wait in the next step
    taken = time.monotonic() - began
    run.log(**found, evaluation_seconds=taken)
    return taken


def _found(task: tasks.Task, model: torch.nn.Module) -> dict[str, float]:
    return {f"test_{name}": value for name, value in task.evaluate(model).items()}


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(prog="python -m paceline.compare.train", description=__doc__)
    parser.add_argument("--task", default="digits", help=", ".join(tasks.names()))
    parser.add_argument("--setting", default="all-reduce", help=", ".join(SETTINGS))
    parser.add_argument("--seed", type=int, default=0)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", type=int)
    length.add_argument("--seconds", type=float, help="of training")
    parser.add_argument("--folder", type=Path, required=True, help="for records")
    chosen = vars(parser.parse_args())
    train(tasks.load(chosen.pop("task")), **chosen)


if __name__ == "__main__":
    main()
