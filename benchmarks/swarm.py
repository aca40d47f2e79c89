"""Does a slow member slow the others of a swarm down, and does an exchange cost more in a larger one?

``slow``: four workers of the lab train with Gossip, and with LocalSGD beside it, all with the same part of a core, or
the last one with an eighth of that: the examples per second of the other three, with the slow one over without it. Both
take turns. Needs what ``paceline lab`` needs.
``size``: two to sixteen workers on this machine, whose models have a million numbers and hardly any work, exchange
after every step, or never: the seconds of processor time that an exchange takes of a worker, and its bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from benchmarks import bench
from benchmarks.contestants.network import own_address
from paceline import record, tasks
from paceline.events import Gossiped
from paceline.lab import Cluster, Lab, Link, run_workers
from paceline.lab.cluster import Worker
from paceline.lab.tools import missing
from paceline.roles import Sync

LINK = Link(10**9, 10**9)
CORES, SLOWER, WORKERS = 0.4, 8, 4
EVERY = 4
WARM_UP = 5.0  # seconds of training that do not count
SIZES = [2, 4, 8, 16]
NEVER = 10**9


def cluster(slow: bool) -> Cluster:
    """Four workers, of which the last may be slow."""
    cores = [CORES] * (WORKERS - 1) + [CORES / SLOWER if slow else CORES]
    return Cluster(tuple(Worker(f"w{rank}", rank, cpu, LINK) for rank, cpu in enumerate(cores)))


def train(sync: str, folder: Path, seconds: float) -> None:
    """What a worker of the lab does: train for some seconds, and write how many examples it did in each."""
    torch.set_num_threads(1)
    task = tasks.load("fashion-mnist")
    model = task.model("lenet", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    role: Sync = pl.sync.Gossip(EVERY, bind=own_address()) if sync == "gossip" else pl.sync.LocalSGD(EVERY)
    rank, used, since = int(os.environ["RANK"]), 0, 0.0
    with pl.Run(model, optimizer, task.train, batch=32 * WORKERS, sync=role) as run:
        began = time.monotonic()
        for step in run.steps(steps=NEVER):
            optimizer.zero_grad()
            for examples in step:
                step.backward(task.loss(model, examples))
            optimizer.step()
            now = time.monotonic() - began
            used += step.plan.counts[rank] if since else 0
            since = since or (now if now > WARM_UP else 0.0)
            if now > seconds:
                break
        speed = used / (time.monotonic() - began - since)
    (folder / f"speed-{rank}.json").write_text(json.dumps(speed))


def in_lab(sync: str, slow: bool, seconds: float) -> list[float]:
    """The examples per second of each worker."""
    with tempfile.TemporaryDirectory() as place, Lab(cluster(slow)) as lab:
        command = [sys.executable, "-m", "benchmarks.swarm", "slow", "--worker", place]
        command += ["--sync", sync, "--seconds", str(seconds)]
        said: list[str] = []
        report = run_workers(lab, command, show=lambda name, line: said.append(f"{name} | {line}"), limit=600)
        if report.exit:
            raise SystemExit("\n".join(said[-30:]))
        return [json.loads((Path(place) / f"speed-{rank}.json").read_text()) for rank in range(WORKERS)]


def slow_member(rounds: int, seconds: float) -> dict[str, Any]:
    """For both ways to average: what a slow member leaves of the speed of the others."""
    found: dict[str, Any] = {}
    for sync in ("gossip", "local"):
        parts = []
        for number in range(rounds):
            # In turns, and not always in the same order: the machine has slow minutes, too.
            speeds = {slow: in_lab(sync, slow, seconds) for slow in sorted([False, True], reverse=bool(number % 2))}
            others = {slow: sum(each[:-1]) for slow, each in speeds.items()}
            parts.append(others[True] / others[False])
            print(f"{sync}: {speeds}, {parts[-1]:.3f}", flush=True)
        found[sync] = {"median": statistics.median(parts), "all": parts}
    return found


def exchange(every: int, steps: int, pause: float, file: str) -> None:
    """What a worker does to show the cost: steps of next to no work; rank 0 writes its processor time and the rest."""
    torch.manual_seed(0)
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    workers, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    events = Path(f"{file}.jsonl")
    recorders = [record.JsonLines(events)] if rank == 0 else []
    data = TensorDataset(torch.randn(4096, 1000))
    used = 0.0
    with pl.Run(model, optimizer, data, batch=workers, sync=pl.sync.Gossip(every), record=recorders) as run:
        for step in run.steps(steps=2 * steps):
            optimizer.zero_grad()
            for (x,) in step:
                step.backward(model(x).mean())
            optimizer.step()
            used = used or (time.process_time() if step.index >= steps else 0.0)  # the first half warms up
            time.sleep(pause)
        used = time.process_time() - used
    if rank == 0:
        done = [one for one in record.read(events) if isinstance(one, Gossiped) and one.step >= steps]
        told = {name: sum(getattr(one, name) for one in done) for name in ("exchanges", "bytes_sent", "bytes_received")}
        Path(file).write_text(json.dumps({"seconds": used, **told}))


def cost(found: dict[str, float], idle: dict[str, float]) -> dict[str, float]:
    """Of one exchange, by what steps with and without exchanges have taken."""
    exchanges = found["exchanges"]
    return {
        "milliseconds": round(1e3 * (found["seconds"] - idle["seconds"]) / exchanges, 2),
        "bytes": round((found["bytes_sent"] + found["bytes_received"]) / exchanges),
        "exchanges": exchanges,
    }


def sizes(rounds: int, steps: int) -> dict[str, Any]:
    """The cost of an exchange in swarms of different sizes, in turns."""
    rows: dict[int, list[dict[str, float]]] = {workers: [] for workers in SIZES}
    for _ in range(rounds):
        for workers, row in rows.items():
            taken = []
            for every in (1, NEVER):
                with tempfile.TemporaryDirectory() as folder:
                    file = Path(folder) / "found.json"
                    bench.launch(workers, exchange, every, steps, 0.02 * workers, str(file))
                    taken.append(json.loads(file.read_text()))
            row.append(cost(*taken))
            print(f"{workers} workers: {row[-1]}", flush=True)
    return {str(workers): summary(row) for workers, row in rows.items()}


def summary(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The middle one, and all."""
    return {"milliseconds": statistics.median(row["milliseconds"] for row in rows), "all": list(rows)}


def main() -> None:
    """Answer one of the questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=["slow", "size"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a training in the lab")
    parser.add_argument("--steps", type=int, default=40, help="that are measured of each worker")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sync", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options.sync, options.worker, options.seconds)
        return
    if options.question == "size":
        found = sizes(options.rounds, options.steps)
    else:
        if lacks := missing():
            raise SystemExit(f"the lab cannot work here: {'; '.join(lacks)}")
        found = slow_member(options.rounds, options.seconds)
    bench.report(f"swarm-{options.question}", found)


if __name__ == "__main__":
    main()
