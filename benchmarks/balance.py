"""Do shares by speed let all workers of an uneven cluster finish together?

Workers of the lab train the small ResNet on CIFAR-10 (or another task) for some seconds with each balance. ``uneven``:
1, 0.5 and 0.25 cores. ``disturbed``: three equal workers, of which one has half of its processor for 30 seconds.
``even``: two equal workers, where there is nothing to gain. Before and after each training all workers train alone at
the same time, without any communication: efficiency is examples per second over the sum of theirs. The machine itself
changes its speed within minutes, so the efficiency that the run records, from the same seconds, is shown beside it, and
the waiting that the shares that suit best in hindsight would have had.
Needs what ``paceline lab`` needs, and ``PACELINE_DATA``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
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
from benchmarks.chart import Span, chart
from paceline import record, tasks
from paceline.events import StepDone
from paceline.lab import Cluster, Lab, Link, run_workers
from paceline.lab.cluster import Event, Worker
from paceline.lab.tools import missing
from paceline.roles import Balance, Sync

LINK = Link(10**9, 10**9)
SETTLED = 2  # looks after which shares must be right
PATIENCE = 120.0  # seconds for all workers to import what they need
DISTURBED, UNDISTURBED = 60.0, 90.0  # seconds after the start of the workers

BALANCES: dict[str, Callable[[int], Balance]] = {
    "even": lambda look: pl.balance.Even(),
    "by speed": lambda look: pl.balance.BySpeed(every=look),
    "per epoch": lambda look: pl.balance.BySpeed.per_epoch(),
}
SYNCS: dict[str, Callable[[int], Sync]] = {
    "all-reduce": lambda look: pl.sync.AllReduce(),
    "local": lambda look: pl.sync.LocalSGD(max(1, look // 2)),
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
    look = options.look
    roles: dict[str, Any] = {"sync": SYNCS[sync](look), "balance": BALANCES[balance](look)} if balance else {}
    batch = options.batch if balance else options.batch // options.workers
    recorders = [record.JsonLines(folder / "events.jsonl")] if balance and rank == 0 else []
    if not balance:
        wait_for_all(folder, rank, options.workers)
    with pl.Run(model, optimizer, dataset, batch=batch, micro=options.micro or None, record=recorders, **roles) as run:
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


def wait_for_all(folder: Path, rank: int, workers: int) -> None:
    """Workers that train alone begin together, too."""
    (folder / f"ready-{rank}").touch()
    end = time.monotonic() + PATIENCE
    while len(list(folder.glob("ready-*"))) < workers:
        if time.monotonic() > end:
            raise TimeoutError(f"not all of {workers} workers were there after {PATIENCE:g} s")
        time.sleep(0.01)


def train(method: str, seconds: float, options: argparse.Namespace) -> tuple[list[StepDone], list[float], float]:
    """The steps of a training in the lab, or each worker's examples per second alone; and when the workers began."""
    with tempfile.TemporaryDirectory() as place, Lab(cluster(options.cluster)) as lab:
        folder = Path(place)
        command = [sys.executable, "-m", "benchmarks.balance", "--worker", place, "--method", method]
        command += ["--seconds", str(seconds)]
        for name in ("cluster", "task", "model", "batch", "micro", "look", "examples", "workers"):
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
    speed = sum(sum(step.counts) for step in steps) / seconds
    known = [(step.efficiency, step.seconds) for step in steps if step.efficiency is not None]
    return {
        "examples_per_second": round(speed, 1),
        "efficiency": round(speed / possible, 3),
        "recorded_efficiency": round(sum(each * t for each, t in known) / sum(t for _, t in known), 3),
        "waiting": [round(sum(step.wait_seconds[rank] for step in steps) / seconds, 3) for rank in workers],
        "waiting_in_hindsight": [round(each, 3) for each in hindsight(steps)],
        "shares": [round(steps[-1].counts[rank] / steps[-1].steps, 1) for rank in workers],
        "seconds": round(seconds, 1),
    }


def hindsight(steps: Sequence[StepDone]) -> list[float]:
    """The part of the time that each worker would have waited with the shares that suit the whole stretch on average.

    What is left then is that speeds go up and down from one exchange to the next, which no share can foresee.
    """
    each = [
        [
            (step.seconds - step.communicate_seconds - wait) / count
            for wait, count in zip(step.wait_seconds, step.counts, strict=True)
        ]
        for step in steps
        if min(step.counts)
    ]
    means = [statistics.fmean(column) for column in zip(*each, strict=True)]
    took = [[seconds / mean for seconds, mean in zip(row, means, strict=True)] for row in each]
    whole = sum(map(max, took))
    return [1 - sum(column) / whole for column in zip(*took, strict=True)]


def stretches(name: str, look: int, steps: list[StepDone], began: float) -> dict[str, tuple[list[StepDone], float]]:
    """The parts of a training that are told apart: two looks after every change, with the part of the processors."""
    skip = SETTLED * look // steps[0].steps
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


def picture(name: str, method: str, steps: Sequence[StepDone], began: float) -> str:
    """The shares of all workers over the seconds of a training, as SVG."""
    start = steps[0].time - steps[0].seconds
    workers = cluster(name).workers
    lines = {
        f"{rank}: {workers[rank].cpu:g} cores": [
            (step.time - step.seconds - start, step.counts[rank] / step.steps) for step in steps
        ]
        for rank in range(len(steps[0].counts))
    }
    away = began - start
    slow = Span(DISTURBED + away, UNDISTURBED + away, "worker 0 has half of its processor")
    spans = [slow] if name == "disturbed" else []
    return chart(f"Examples of each worker in a step ({method})", "seconds", lines, spans)


def alone(options: argparse.Namespace) -> list[float]:
    """The examples per second of every worker when each trains for itself."""
    found = [round(each, 1) for each in train("alone", options.alone, options)[1]]
    print(f"alone: {found} examples/s", flush=True)
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
    parser.add_argument("--micro", type=int, default=0, help="the most that a worker takes at once; 0: its share")
    parser.add_argument("--look", type=int, default=10, help="steps between two looks at the speeds")
    parser.add_argument("--examples", type=int, default=4800, help="of one epoch")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--alone", type=float, default=20.0, help="seconds of training alone before and after each")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pictures", type=Path, help="folder for a picture of the shares of each training")
    options = parser.parse_args()
    if options.worker:
        worker(options.methods[0], options.worker, options)
        return
    if lacks := missing():
        raise SystemExit(f"the lab cannot work here: {'; '.join(lacks)}")
    if options.cluster == "disturbed" and options.seconds < UNDISTURBED + 20:
        raise SystemExit(f"the disturbance ends after {UNDISTURBED:g} s; give --seconds 125 or more")
    options.workers = len(cluster(options.cluster).workers)
    rows: list[dict[str, Any]] = []
    before = alone(options)
    for number in range(options.rounds):
        for method in options.methods or METHODS:
            steps, _, began = train(method, options.seconds, options)
            after = alone(options)
            possible = (sum(before) + sum(after)) / 2
            by_epoch = method.endswith("per epoch") and options.cluster != "disturbed"
            look = options.examples // options.batch if by_epoch else options.look
            parts = stretches(options.cluster, look, steps, began).items()
            found = {what: look_at(some, possible * part) for what, (some, part) in parts if some}
            rows.append({"round": number, "method": method, "alone": [before, after], **found})
            if options.pictures:
                file = options.pictures / f"{options.cluster}, {method}.svg".replace(", ", "-").replace(" ", "-")
                file.write_text(picture(options.cluster, method, steps, began))
            print(f"round {number}, {method}", flush=True)
            for what, row in found.items():
                print(f"    {what}: {row}", flush=True)
            before = after
    bench.report(f"balance-{options.cluster}", {"options": {**vars(options), "pictures": None}, "rows": rows})


if __name__ == "__main__":
    main()
