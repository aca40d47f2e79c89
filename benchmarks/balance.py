"""Do shares by speed let all workers of an uneven cluster finish together?

Workers of the lab train the small ResNet on CIFAR-10 (or another task) for some seconds with each balance. ``uneven``:
1, 0.5 and 0.25 cores. ``disturbed``: three equal workers, of which one has half of its processor for 30 seconds.
``even``: two equal workers, where there is nothing to gain. Beside them all workers train alone at the same time,
without any communication: efficiency is examples per second over the sum of theirs. Needs what ``paceline lab`` needs,
and ``PACELINE_DATA``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

import paceline as pl
from benchmarks import bench
from paceline import record, tasks
from paceline.events import StepDone
from paceline.lab import Cluster, Lab, Link, run_workers
from paceline.lab.cluster import Event, Worker
from paceline.lab.tools import missing
from paceline.roles import Balance, Sync

LINK = Link(10**9, 10**9)
SETTLED = 2  # looks after which shares must be right
LOOK = 10  # steps
DISTURBED, UNDISTURBED = 60.0, 90.0  # seconds after the start of the workers

BALANCES: dict[str, Callable[[], Balance]] = {
    "even": pl.balance.Even,
    "by speed": lambda: pl.balance.BySpeed(every=LOOK),
    "per epoch": pl.balance.BySpeed.per_epoch,
}
SYNCS: dict[str, Callable[[], Sync]] = {
    "all-reduce": pl.sync.AllReduce,
    "local": lambda: pl.sync.LocalSGD(LOOK // 2),
}
METHODS = [f"{sync}, {balance}" for sync in SYNCS for balance in BALANCES]


def cluster(name: str) -> Cluster:
    """Who trains, and what happens to them."""
    cores = {"uneven": [1.0, 0.5, 0.25], "disturbed": [0.55, 0.55, 0.55], "even": [0.85, 0.85]}[name]
    events = []
    if name == "disturbed":
        events = [Event(DISTURBED, "w0", "set", cpu=cores[0] / 2), Event(UNDISTURBED, "w0", "set", cpu=cores[0])]
    workers = [Worker(f"w{rank}", rank, cpu, LINK) for rank, cpu in enumerate(cores)]
    return Cluster(tuple(workers), events=tuple(events))


def worker(method: str, folder: Path, options: argparse.Namespace) -> None:
    """Train for some seconds; with a record, or alone, and then the speed is written."""
    torch.set_num_threads(1)
    task = tasks.load(options.task)
    model = task.model(options.model, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    dataset = Subset(task.train, range(options.examples))
    rank = int(os.environ["RANK"])
    if method == "alone":
        os.environ["WORLD_SIZE"] = "1"
    sync, _, balance = method.partition(", ")
    roles: dict[str, Any] = {"sync": SYNCS[sync](), "balance": BALANCES[balance]()} if balance else {}
    batch = options.batch if balance else options.batch // options.workers
    recorders = [record.JsonLines(folder / "events.jsonl")] if balance and rank == 0 else []
    with pl.Run(model, optimizer, dataset, batch=batch, record=recorders, **roles) as run:
        began = time.monotonic()
        for step in run.steps(steps=10**9):
            optimizer.zero_grad()
            for examples in step:
                step.backward(task.loss(model, examples))
            optimizer.step()
            if time.monotonic() - began > options.seconds:
                run.stop()
        seconds = time.monotonic() - began
    if not balance:
        (folder / f"alone-{rank}.json").write_text(json.dumps(run.progress.examples / seconds))


def train(method: str, options: argparse.Namespace) -> tuple[list[StepDone], list[float], float]:
    """The steps of a training in the lab, or each worker's examples per second alone; and when the workers began."""
    with tempfile.TemporaryDirectory() as place, Lab(cluster(options.cluster)) as lab:
        folder = Path(place)
        command = [sys.executable, "-m", "benchmarks.balance", "--worker", place, "--method", method]
        for name in ("cluster", "task", "model", "batch", "seconds", "examples", "workers"):
            command += [f"--{name}", str(getattr(options, name))] if getattr(options, name) else []
        said: list[str] = []
        began = time.time()
        report = run_workers(lab, command, show=lambda name, line: said.append(f"{name} | {line}"), limit=900)
        if report.exit:
            raise SystemExit("\n".join(said[-30:]))
        alone = [json.loads(file.read_text()) for file in sorted(folder.glob("alone-*"))]
        events = folder / "events.jsonl"
        steps = [e for e in record.read(events) if isinstance(e, StepDone)] if events.exists() else []
        return steps, alone, began


def look_at(steps: Sequence[StepDone], possible: float) -> dict[str, Any]:
    """What a stretch of steps came to, by the wall clock; ``possible`` are the examples per second of all, alone."""
    seconds = sum(step.seconds for step in steps)
    workers = range(len(steps[0].counts))
    return {
        "efficiency": round(sum(sum(step.counts) for step in steps) / seconds / possible, 3),
        "recorded_efficiency": round(sum(step.seconds * (step.efficiency or 0.0) for step in steps) / seconds, 3),
        "waiting": [round(sum(step.wait_seconds[rank] for step in steps) / seconds, 3) for rank in workers],
        "shares": [round(steps[-1].counts[rank] / steps[-1].steps, 1) for rank in workers],
        "seconds": round(seconds, 1),
    }


def stretches(name: str, steps: list[StepDone], began: float) -> dict[str, tuple[list[StepDone], float]]:
    """The parts of a training that are told apart: two looks after every change, with the part of the processors."""
    skip = SETTLED * LOOK // steps[0].steps
    if name != "disturbed":
        return {"before the first look": (steps[: skip // SETTLED], 1.0), "settled": (steps[skip:], 1.0)}
    found = {}
    for what, since, until, part in (
        ("before", 0.0, DISTURBED, 1.0),
        ("disturbed", DISTURBED, UNDISTURBED, 2.5 / 3),
        ("after", UNDISTURBED, math.inf, 1.0),
    ):
        found[what] = [s for s in steps if since <= s.time - s.seconds - began and s.time - began < until][skip:], part
    return found


def main() -> None:
    """Measure all methods, one after the other, as often as asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cluster", choices=["uneven", "disturbed", "even"], default="uneven")
    parser.add_argument("--method", action="append", choices=[*METHODS, "alone"], dest="methods")
    parser.add_argument("--task", default="cifar10")
    parser.add_argument("--model", default=None)
    parser.add_argument("--batch", type=int, default=96, help="of all workers together")
    parser.add_argument("--examples", type=int, default=4800, help="of one epoch")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    if options.worker:
        worker(options.methods[0], options.worker, options)
        return
    if lacks := missing():
        raise SystemExit(f"the lab cannot work here: {'; '.join(lacks)}")
    options.workers = len(cluster(options.cluster).workers)
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds):
        _, alone, _ = train("alone", options)
        print(f"round {number}, alone: {[round(each, 1) for each in alone]} examples/s", flush=True)
        for method in options.methods or METHODS:
            steps, _, began = train(method, options)
            parts = stretches(options.cluster, steps, began).items()
            found = {what: look_at(some, sum(alone) * part) for what, (some, part) in parts if some}
            rows.append({"round": number, "method": method, **found})
            print(f"round {number}, {method}: {found}", flush=True)
    bench.report(f"balance-{options.cluster}", {"options": vars(options), "rows": rows})


if __name__ == "__main__":
    main()
