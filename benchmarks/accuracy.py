"""What does it cost in accuracy to average seldom, or in few bits?

The same training by workers of this machine, with each method and several seeds: equal numbers of examples, learning
rate with a warm-up and a cosine in examples. The accuracy is that of the consensus on the test set at the end.
Needs ``PACELINE_DATA`` for tasks whose data does not come with a package.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

import paceline as pl
from benchmarks import bench
from paceline import tasks
from paceline.roles import Sync

METHODS: dict[str, Callable[[], Sync]] = {
    "all-reduce": lambda: pl.sync.AllReduce(),
    "H = 4": lambda: pl.sync.LocalSGD(4),
    "H = 16": lambda: pl.sync.LocalSGD(16),
    "H = 16, 8 bit": lambda: pl.sync.LocalSGD(16, codec=pl.codec.Uniform8()),
    "H = 16, half": lambda: pl.sync.LocalSGD(16, codec=pl.codec.Half()),
    "H = 16, overlap 8": lambda: pl.sync.LocalSGD(16, overlap=8),
    "all-reduce, half": lambda: pl.sync.AllReduce(codec=pl.codec.Half()),
}
WARM_UP = 0.05  # of all examples


def factor(done: float) -> float:
    """What the learning rate is multiplied by when this part of the examples has been used."""
    return min(1.0, done / WARM_UP) * 0.5 * (1 + math.cos(math.pi * done))


def train(options: dict[str, Any], method: str, seed: int, file: str) -> None:
    """One training; rank 0 writes what came of it."""
    task = tasks.load(options["task"])
    model = task.model(options["model"], seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=options["lr"], momentum=0.9, weight_decay=options["decay"])
    dataset: Dataset[Any] = task.train
    if options["limit"]:
        dataset = Subset(dataset, range(options["limit"]))
    total = options["epochs"] * (options["limit"] or len(task.train))
    sent, began = 0, time.perf_counter()
    with pl.Run(model, optimizer, dataset, batch=options["batch"], seed=seed, sync=METHODS[method]()) as run:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: factor(run.progress.examples / total))
        for step in run.steps(epochs=options["epochs"]):
            optimizer.zero_grad()
            for batch in step:
                step.backward(task.loss(model, batch))
            optimizer.step()
            schedule.step()
            sent += run.sync.bytes_sent if step.round else 0
        seconds = time.perf_counter() - began
        with run.consensus():
            if run.fleet.rank == 0:
                found = {**task.evaluate(model), "seconds": seconds, "bytes_sent": sent}
                Path(file).write_text(json.dumps(found))


def main() -> None:
    """Train with all methods and seeds, and show the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="fashion-mnist")
    parser.add_argument("--model", help="the task's first by default")
    parser.add_argument("--method", action="append", choices=list(METHODS), dest="methods")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128, help="of all workers together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--decay", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=0, help="training examples to use; 0: all")
    options = vars(parser.parse_args())
    methods = options["methods"] or ["all-reduce", "H = 4", "H = 16", "H = 16, 8 bit"]
    found: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options["seeds"]):
            for method in methods:
                file = Path(folder) / "found.json"
                bench.launch(options["workers"], train, options, method, seed, str(file))
                found[method].append(json.loads(file.read_text()))
                print(f"seed {seed}, {method}: {found[method][-1]}", flush=True)
    base = [one["accuracy"] for one in found[methods[0]]]
    for method in methods:
        accuracies = [100 * one["accuracy"] for one in found[method]]
        differences = [mine - 100 * other for mine, other in zip(accuracies, base, strict=True)]
        spread = f"{min(accuracies):.2f} … {max(accuracies):.2f}"
        print(
            f"{method:20s} {statistics.mean(accuracies):.2f} % ({spread}), against {methods[0]} "
            f"{statistics.mean(differences):+.2f} points ({min(differences):+.2f} … {max(differences):+.2f})"
        )
    bench.report(f"accuracy-{options['task']}", {"options": options, "methods": found})


if __name__ == "__main__":
    main()
