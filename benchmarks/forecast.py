"""Is an epoch forecast well, and is the method that ``paceline probe`` recommends the fastest?

In each cluster of the lab: measure as ``paceline probe`` does, then train with every method for some seconds, the same
model, batch and data, and with torch's DistributedDataParallel in a plain loop. Seconds for an epoch are those of the
examples that all workers did in that time, after a while in which shares settle. Needs what ``paceline lab`` needs, and
``PACELINE_DATA`` unless the task is digits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

import paceline as pl
from benchmarks import bench
from benchmarks.contestants.network import own_address
from paceline import tasks
from paceline.lab import Lab, run_workers
from paceline.lab.file import find_cluster, read_cluster
from paceline.survey.predict import EVERY

SETTLE = 0.3  # of the time, which is not counted
METHODS: dict[str, Callable[[float], dict[str, Any]]] = {
    "all-reduce": lambda seconds: {},
    "balance": lambda seconds: {"balance": pl.balance.BySpeed()},
    "local": lambda seconds: {"sync": pl.sync.LocalSGD(EVERY)},
    "local, 8 bit": lambda seconds: {"sync": pl.sync.LocalSGD(EVERY, codec=pl.codec.Uniform8())},
    "local by time": lambda seconds: {
        "sync": pl.sync.LocalSGD(pl.sync.Seconds(seconds), codec=pl.codec.Uniform8()),
    },
    "gossip": lambda seconds: {"sync": pl.sync.Gossip(EVERY, bind=own_address())},
}
"""The roles of each, given how long a round of the slowest worker takes."""


class Window:
    """Counts the examples of this worker in a stretch of time, which begins a while after its first step."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._first, self._since, self._examples = seconds, 0.0, 0.0, 0
        self.rate = 0.0
        """Examples per second, when it is over."""

    def over(self, examples: int) -> bool:
        """A step with so many examples has ended; whether that is enough."""
        now = time.monotonic()
        self._first = self._first or now
        if self._since:
            self._examples += examples
            self.rate = self._examples / (now - self._since)
        elif now - self._first > SETTLE * self._seconds:
            self._since = now
        return now - self._first > self._seconds


def with_ddp(task: tasks.Task, model: torch.nn.Module, batch: int, window: Window) -> None:
    """A plain loop, in which all find out every few steps whether one has done enough."""
    dist.init_process_group("gloo")
    share = batch // dist.get_world_size()
    at = dist.get_rank() * share
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3, momentum=0.9)
    enough = torch.zeros(1)
    while not enough:
        over = False
        for _ in range(EVERY):
            examples = default_collate([task.train[(at + n) % len(task.train)] for n in range(share)])
            at += batch
            optimizer.zero_grad()
            task.loss(wrapped, examples).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            over = window.over(share)
        enough.fill_(over)
        dist.all_reduce(enough)
    dist.destroy_process_group()


def with_run(task: tasks.Task, model: torch.nn.Module, batch: int, window: Window, roles: dict[str, Any]) -> None:
    """The same in a run."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with pl.Run(model, optimizer, task.train, batch=batch, **roles) as run:
        for step in run.steps(steps=10**9):
            optimizer.zero_grad()
            own = 0
            for examples in step:
                step.backward(task.loss(model, examples))
                own += len(examples[0])
            optimizer.step()
            if window.over(own):
                run.stop()


def worker(options: argparse.Namespace) -> None:
    """Train for some seconds, and write how many examples this worker does in one."""
    torch.set_num_threads(1)
    task, window = tasks.load(options.task), Window(options.seconds)
    model = task.model(options.model, seed=0)
    if options.method == "ddp":
        with_ddp(task, model, options.batch, window)
    else:
        with_run(task, model, options.batch, window, METHODS[options.method](options.round))
    Path(options.worker, f"{os.environ['RANK']}.json").write_text(json.dumps(window.rate))


def measured(cluster: str, method: str, round: float, options: argparse.Namespace) -> float:
    """Examples per second of all workers together."""
    path = find_cluster(cluster)
    with tempfile.TemporaryDirectory() as folder, Lab(read_cluster(path), path.stem) as lab:
        command = [sys.executable, "-m", "benchmarks.forecast", "--worker", folder, "--method", method]
        command += ["--round", str(round), "--seconds", str(options.seconds), *_task(options)]
        said: list[str] = []
        report = run_workers(lab, command, show=lambda name, line: said.append(f"{name} | {line}"), limit=900)
        if report.exit:
            raise SystemExit("\n".join(said[-30:]))
        return sum(float(file.read_text()) for file in Path(folder).glob("*.json"))


def probed(cluster: str, options: argparse.Namespace) -> dict[str, Any]:
    """What ``paceline probe`` finds."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "paceline", "probe", "--cluster", cluster, "--out", str(out)]
        subprocess.run([*command, *_task(options), "--seconds", str(options.probe)], check=True, timeout=900)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _task(options: argparse.Namespace) -> list[str]:
    model = ["--model", options.model] if options.model else []
    return ["--task", options.task, "--batch", str(options.batch), *model]


def look(cluster: str, options: argparse.Namespace) -> dict[str, Any]:
    """Forecasts and measurements in one cluster, in seconds for an epoch."""
    found = probed(cluster, options)
    survey, rows = found["survey"], {each["name"]: each for each in found["forecasts"]}
    slowest = max(fixed + each * options.batch / len(survey["speeds"]) for fixed, each in survey["speeds"])
    names = options.methods or ["ddp", *METHODS]
    rates = {name: measured(cluster, name, EVERY * slowest, options) for name in names}
    results = {}
    for name, rate in rates.items():
        forecast = rows["all-reduce" if name == "ddp" else name]["seconds"]
        epoch = survey["examples"] / rate
        results[name] = {
            "forecast": round(forecast, 2),
            "measured": round(epoch, 2),
            "ratio": round(forecast / epoch, 3),
        }
        print(f"{cluster}: {name:14s} {forecast:8.2f} s forecast, {epoch:8.2f} s measured, {forecast / epoch:.3f}")
    return {"methods": results, "recommended": found["recommended"], "survey": survey}


def main() -> None:
    """Ask for clusters, and look at each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", nargs="+", default=["even", "uneven", "slow"])
    parser.add_argument("--task", default="fashion-mnist")
    parser.add_argument("--model")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each training")
    parser.add_argument("--probe", type=float, default=60.0, help="seconds of measuring")
    parser.add_argument("--method", action="append", dest="methods", choices=["ddp", *METHODS])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--round", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        options.method = options.methods[0]
        worker(options)
        return
    found = {}
    for cluster in options.clusters:
        found[cluster] = look(cluster, options)
        methods = found[cluster]["methods"]
        best, chosen = min(methods, key=lambda name: methods[name]["measured"]), found[cluster]["recommended"]
        worse = methods[chosen]["measured"] / methods[best]["measured"] if chosen in methods else float("nan")
        print(f"{cluster}: recommended {chosen}, which takes {worse:.2f} times as long as the fastest, {best}")
    bench.report("forecast", found)


if __name__ == "__main__":
    main()
