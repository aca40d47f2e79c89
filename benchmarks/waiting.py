"""How long do workers of an uneven cluster wait for each other under Local SGD?

Three workers with 1, 0.5 and 0.25 cores (the example ``uneven``) train on Fashion-MNIST, with rounds of 16 steps and
with rounds of seconds. The shares of the time are those of the run's own record. Needs what ``paceline lab`` needs,
and ``PACELINE_DATA``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import paceline as pl
from benchmarks import bench
from paceline import record, tasks
from paceline.lab import Lab, find_cluster, read_cluster, run_workers
from paceline.lab.tools import missing
from paceline.roles import Sync
from paceline.tasks import LeNet

METHODS: dict[str, Callable[[], Sync]] = {
    "all-reduce": lambda: pl.sync.AllReduce(),
    "16 steps": lambda: pl.sync.LocalSGD(16),
    "2 seconds": lambda: pl.sync.LocalSGD(pl.sync.Seconds(2.0)),
    "5 seconds": lambda: pl.sync.LocalSGD(pl.sync.Seconds(5.0)),
}


def worker(method: str, folder: str, epochs: int) -> None:
    """Train, with a record."""
    task = tasks.load("fashion-mnist")
    torch.manual_seed(0)
    model = LeNet(1, 28, 10, (8, 16), [1200])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    recorders = [record.JsonLines(Path(folder) / "events.jsonl")]
    with pl.Run(model, optimizer, task.train, batch=192, sync=METHODS[method](), record=recorders) as run:
        for step in run.steps(epochs=epochs):
            optimizer.zero_grad()
            for batch in step:
                step.backward(task.loss(model, batch))
            optimizer.step()


def measure(method: str, epochs: int) -> dict[str, Any]:
    """The summary of one training in the lab."""
    with tempfile.TemporaryDirectory() as folder, Lab(read_cluster(find_cluster("uneven"))) as lab:
        command = [sys.executable, "-m", "benchmarks.waiting", "--worker", folder]
        command += ["--method", method, "--epochs", str(epochs)]
        said: list[str] = []
        report = run_workers(lab, command, show=lambda name, line: said.append(f"{name} | {line}"), limit=900)
        if report.exit:
            raise SystemExit("\n".join(said[-30:]))
        found = record.summary(record.read(Path(folder) / "events.jsonl"))
    return {
        "examples_per_second": round(found.examples_per_second),
        "waiting": [round(each.wait, 4) for each in found.workers],
        "communicating": [round(each.communicate, 4) for each in found.workers],
        "examples": [each.examples for each in found.workers],
    }


def main() -> None:
    """Measure all methods, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--method", action="append", choices=list(METHODS), dest="methods")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    methods = options.methods or list(METHODS)
    if options.worker:
        worker(methods[0], options.worker, options.epochs)
        return
    if lacks := missing():
        raise SystemExit(f"the lab cannot work here: {'; '.join(lacks)}")
    rows = {}
    for method in methods:
        rows[method] = measure(method, options.epochs)
        print(f"{method}: {rows[method]}", flush=True)
    bench.report("waiting", rows)


if __name__ == "__main__":
    main()
