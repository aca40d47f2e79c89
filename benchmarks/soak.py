"""Does a swarm survive a fault every ten seconds, and does anything grow meanwhile?

Four workers on this machine train with Gossip. Every ten seconds one of them, drawn by a fixed seed, is killed and
started again with the invitation, or frozen for some seconds. One is frozen at times, but never killed: whatever grows,
grows there. At the end all must have the same model. Memory, file descriptors, sockets and threads are compared between
the first and the last third of the time; stalls are the seconds between the ends of two rounds, without those in which
the worker itself was frozen.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from benchmarks import bench
from benchmarks.growth import Growth, Sample, growth, longest_stall, look
from benchmarks.victims import Victim, mark_training, wait_for
from paceline import record
from paceline.testing.places import Loopback
from paceline.testing.processes import Work

WORKERS, WITNESS = 4, 3
EVERY = 10.0  # seconds from one fault to the next
FREEZE = (1.0, 6.0)  # seconds that one lasts
AGAIN = 1.0  # seconds until who was killed is started again, as a launcher does it
LIMIT = 90.0  # seconds to begin, to come back, and to end
PAUSE = 0.01  # seconds of a step that are no work: all share few cores
STALL = 2.0  # seconds that no step may take longer than, because of others
MEGABYTES = 10.0  # that memory may grow by: allocators are not exact
DESCRIPTORS = 2  # that may be more for a moment, when somebody connects anew


class Fault(NamedTuple):
    """What happens to a worker, so many seconds after all have begun."""

    at: float
    worker: int
    frozen: float
    """Seconds, or 0 if it is killed."""


def plan(seconds: float, seed: int) -> list[Fault]:
    """A fault every ten seconds, the last one long enough before the end for everybody to be back."""
    chance, faults = random.Random(seed), []
    for number in range(1, int(seconds // EVERY)):
        worker, kills, frozen = chance.randrange(WORKERS), chance.random() < 0.5, chance.uniform(*FREEZE)
        faults.append(Fault(number * EVERY, worker, 0.0 if kills and worker != WITNESS else frozen))
    return faults


def train(folder: Path) -> None:
    """What a worker does, in all its lives."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 1000), nn.ReLU(), nn.Linear(1000, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs = torch.randn(4096, 100)
    role = pl.sync.Gossip(4, invitation=folder / "invitation")
    settings: dict[str, Any] = {
        "record": [record.JsonLines(folder / f"events-{rank}.jsonl")],
        "checkpoint": pl.Checkpoint(folder / "saves", seconds=5.0, keep=2),
        "deadline": LIMIT,
    }
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    with pl.Run(model, optimizer, data, batch=8 * WORKERS, sync=role, **settings) as run:
        run.resume(folder / "saves", missing_ok=True)
        first = run.progress.step
        for step in run.steps(examples=10**15):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            time.sleep(PAUSE)
            if step.index == first:
                mark_training(folder)
            if (folder / "stop").exists():
                run.stop()
        (folder / f"digest-{rank}").write_text(run.replica.digest())


class _Course:
    """What happens to the workers, and what they are seen to hold meanwhile."""

    def __init__(self, workers: list[Victim], faults: list[Fault]) -> None:
        self._workers, self._faults = workers, faults
        self._until: dict[int, float] = {}
        self.samples: dict[int, list[Sample]] = {each.rank: [] for each in workers}

    def happen(self, seconds: float) -> None:
        """Let it, for so long, and until all are back."""
        began, looked = time.monotonic(), 0.0
        while self._faults or time.monotonic() < began + seconds or not all(each.trains for each in self._workers):
            now = time.monotonic()
            if now > began + seconds + LIMIT:
                missing = [each.rank for each in self._workers if not each.trains]
                raise AssertionError(f"workers {missing} are not back in time")
            for each in self._workers:
                each.check()
                if now >= self._until.get(each.rank, math.inf):
                    self._recover(each)
            if self._faults and now >= began + self._faults[0].at and self._workers[self._faults[0].worker].trains:
                self._suffer(self._faults.pop(0), now)
            if now >= looked + 0.5:
                looked = now
                self._look()
            time.sleep(0.05)
        self._look()  # who has just come back was not looked at yet

    def _suffer(self, fault: Fault, now: float) -> None:
        worker = self._workers[fault.worker]
        self._until[worker.rank] = now + (fault.frozen or AGAIN)
        worker.freeze() if fault.frozen else worker.kill()

    def _recover(self, worker: Victim) -> None:
        """What was to last has lasted."""
        del self._until[worker.rank]
        if worker.dead:
            worker.begin()
            self.samples[worker.rank] = []
        else:
            worker.thaw()

    def _look(self) -> None:
        training = [each for each in self._workers if each.trains]
        for each in training:
            self.samples[each.rank].append(look(each.process.pid or 0, len(training) == len(self._workers)))


def run(seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """What was found, for all workers and for each."""
    place = Loopback(WORKERS)
    place.open()
    workers = [Victim(rank, place, Work(train, (folder,)), folder) for rank in range(WORKERS)]
    try:
        wait_for(lambda: all(each.trains for each in workers), workers, "all workers to train", LIMIT)
        faults = plan(seconds, seed)
        course = _Course(workers, list(faults))
        course.happen(seconds)
        (folder / "stop").touch()
        wait_for(lambda: all(each.finished for each in workers), (), "all workers to come to the end", LIMIT)
        kills = sum(not fault.frozen for fault in faults)
        return {
            "seconds": seconds,
            "seed": seed,
            "killed": kills,
            "frozen": len(faults) - kills,
            "digests": len({(folder / f"digest-{rank}").read_text() for rank in range(WORKERS)}),
            "workers": [_row(each, course.samples[each.rank], folder) for each in workers],
        }
    finally:
        for each in workers:
            each.close()


def _row(worker: Victim, samples: list[Sample], folder: Path) -> dict[str, Any]:
    events = list(record.read(folder / f"events-{worker.rank}.jsonl"))
    found, grown = record.summary(events), growth(samples)
    assert found.gossip is not None
    counted = ("exchanges", "refusals", "timeouts", "lost", "late", "strangers")
    return {
        "worker": worker.rank,
        "lives": worker.lives,
        "steps": found.steps,
        **{name: getattr(found.gossip, name) for name in counted},
        "longest stall": round(longest_stall(events, worker.frozen), 2),
        **{name: getattr(samples[-1], name) for name in Growth._fields},
        "growth": None if grown is None else {name: round(each, 1) for name, each in grown._asdict().items()},
    }


def faults_of(found: dict[str, Any]) -> list[str]:
    """What is wrong with that; stalls are left out, since how busy a machine is does not depend on the swarm alone."""
    wrong = [] if found["digests"] == 1 else [f"there are {found['digests']} final models"]
    allowed = {"megabytes": MEGABYTES, "descriptors": DESCRIPTORS, "sockets": DESCRIPTORS, "threads": 0}
    for row in found["workers"]:
        grown = row["growth"] or {}
        wrong += [
            f"worker {row['worker']} has {more:g} {name} more at the end"
            for name, more in grown.items()
            if more > allowed[name]
        ]
    if found["workers"][WITNESS]["growth"] is None:
        wrong.append("nobody has lived for long enough to say whether something grows")
    return wrong


def show(found: dict[str, Any]) -> None:
    """A table for people."""
    print(
        f"{found['seconds']:g} s, {found['killed']} times killed, {found['frozen']} times frozen, "
        f"{found['digests']} final model{'s' if found['digests'] > 1 else ''}"
    )
    names = [name for name in found["workers"][0] if name != "growth"]
    names += [f"+{name}" for name in Growth._fields]
    print("  ".join(names))
    for row in found["workers"]:
        grown = row["growth"] or dict.fromkeys(Growth._fields, "-")
        cells = [grown[name[1:]] if name.startswith("+") else row[name] for name in names]
        told = [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells]
        print("  ".join(cell.rjust(len(name)) for cell, name in zip(told, names, strict=True)))


def main() -> None:
    """Answer the question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(options.seconds, options.seed, Path(folder))
    show(found)
    longest = max(row["longest stall"] for row in found["workers"])
    wrong = [*faults_of(found), *([f"a step took {longest} s"] if longest > STALL else [])]
    print("\n".join(wrong) or f"nothing grows, and no step took longer than {longest} s")
    bench.report("soak", {**found, "wrong": wrong})


if __name__ == "__main__":
    main()
