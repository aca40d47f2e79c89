"""What the benchmarks of accuracy share: one training by workers of this machine, and the same with methods and seeds.

Equal numbers of examples for all, unless a method says otherwise, and a learning rate with a warm-up and a cosine in
examples. The accuracy is that of the consensus on the test set at the end. Needs ``PACELINE_DATA`` for tasks whose data
does not come with a package. A training whose loss is not finite any more ends there, and is told as diverged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

import paceline as pl
from benchmarks import bench
from paceline import tasks
from paceline.roles import Batch, LearningRate, Sync

__all__ = ["PATIENCE", "Done", "Roles", "compare", "momentum"]

WARM_UP = 0.05  # of all examples
PATIENCE = 7200.0  # seconds: who measures something else meanwhile may pause all workers
LONGEST = 16  # times the epochs, where a training ends by another count


class Roles(NamedTuple):
    """What a method consists of."""

    optimizer: torch.optim.Optimizer
    batch: int | Batch
    sync: Sync | None = None
    lr: LearningRate = pl.lr.Constant()
    micro: int | None = None
    probe: pl.Probe | None = None
    worth: Callable[[], float] | None = None
    """Examples that the training is worth so far, by which it is scheduled and ends; by default those it has used."""


Make = Callable[[str, dict[str, Any], nn.Module], Roles]
"""``make(method, options, model)``; a function of a module, so that worker processes find it.

``options["total"]`` are the examples of the whole training.
"""


def momentum(options: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=options["lr"], momentum=0.9, weight_decay=options["decay"])


def factor(done: float) -> float:
    """What the learning rate is multiplied by when this part of the examples has been used."""
    return min(1.0, done / WARM_UP) * 0.5 * (1 + math.cos(math.pi * done))


def train(make: Make, method: str, options: dict[str, Any], seed: int, file: str) -> None:
    """One training; rank 0 writes what came of it."""
    task = tasks.load(options["task"])
    model = task.model(options["model"], seed=seed)
    half = options.get("bfloat16", False)
    if not half:  # where convolutions take three quarters of the time; in bfloat16 norms become slow by it
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # which torch documents
    dataset: Dataset[Any] = task.train
    if options["limit"]:
        dataset = Subset(dataset, range(options["limit"]))
    total = options["epochs"] * (options["limit"] or len(task.train))
    roles = make(method, {**options, "total": total}, model)
    looks = Looks(options)
    sent = rounds = 0
    began = time.perf_counter()
    with pl.Run(
        model,
        roles.optimizer,
        dataset,
        batch=roles.batch,
        sync=roles.sync,
        lr=roles.lr,
        micro=roles.micro,
        probe=roles.probe,
        seed=seed,
        deadline=PATIENCE,
    ) as run:
        worth = roles.worth or (lambda: run.progress.examples)
        schedule = torch.optim.lr_scheduler.LambdaLR(roles.optimizer, lambda _: factor(min(1.0, worth() / total)))
        diverged = False
        try:
            for step in run.steps(epochs=options["epochs"] * (LONGEST if roles.worth else 1)):
                roles.optimizer.zero_grad()
                for batch in step:
                    with torch.autocast("cpu", torch.bfloat16, enabled=half):
                        loss = task.loss(model, batch)
                    step.backward(loss)
                roles.optimizer.step()
                schedule.step()
                if step.round is not None:
                    rounds += 1
                    sent += run.sync.bytes_sent
                    if looks.due(run.progress.examples):
                        with run.consensus():
                            reached = run.fleet.rank == 0 and looks.see(task.evaluate(model)["accuracy"])
                        if reached:
                            looks.found = {"rounds": rounds, "bytes": sent, "examples": run.progress.examples}
                if roles.worth and worth() >= total:
                    break
        except (pl.NonFiniteLoss, pl.WorkerLost) as error:  # each worker may have a loss of its own
            if pl.NonFiniteLoss.__name__ not in f"{type(error).__name__} {error}":
                raise
            diverged = True  # a result: so far this method came
        seconds = time.perf_counter() - began
        with contextlib.nullcontext() if diverged else run.consensus():
            if run.fleet.rank == 0:
                last = run.batch.size(run.progress)
                totals: dict[str, float] = {
                    "steps": run.progress.step,
                    "examples": run.progress.examples,
                    "last_batch": last,
                }
                totals |= {"rounds": rounds, "bytes_sent": sent}
                if isinstance(roles.lr, pl.lr.AdaScale):
                    totals["worth"] = roles.lr.steps
                quality = {name: value for name, value in task.evaluate(model).items() if math.isfinite(value)}
                found = {**quality, "seconds": seconds, **totals, "to_target": looks.found, "diverged": diverged}
                Path(file).write_text(json.dumps(found))


class Looks:
    """Looks at the accuracy now and then, until it has reached the target."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._target, self._every = options["target"], options["look"]
        self._next = self._every
        self.found: dict[str, int] | None = None
        """Where it was reached."""

    def due(self, examples: int) -> bool:
        """Whether it is time: the same on all workers, so that they look together, also when one has found it."""
        if not self._target or examples < self._next:
            return False
        self._next = examples + self._every
        return True

    def see(self, accuracy: float) -> bool:
        """Whether this is the first look that reaches the target."""
        return self.found is None and accuracy >= self._target


def compare(
    question: str,
    about: str | None,
    make: Make,
    methods: Sequence[str],
    usual: Sequence[str] | None = None,
    without: Sequence[str] = (),
    alone: Sequence[str] = (),
    **defaults: Any,
) -> None:
    """Train with all methods and seeds, and show what came of it beside the first method.

    What was trained before with the same settings is not trained again: every training is a line in a file that is kept
    in the repository, so that a comparison of hours can be interrupted, and methods be added. ``without`` are settings
    that make no difference to these methods. Those in ``alone`` are trained by one worker: several would train the same
    model, to rounding (tests/laws/test_equals_one_process.py), in three times as many seconds of the processor. What
    several have trained before counts, too.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    settings: dict[str, Any] = {
        "task": "fashion-mnist",
        "model": None,
        "epochs": 5,
        "workers": 4,
        "batch": 128,
        "lr": 0.05,
        "decay": 0.0,
        "seeds": 3,
        "first": 0,
        "limit": 0,
        "target": 0.0,
        "look": 20_000,
        **defaults,
    }
    told = {
        "model": "the task's first by default",
        "batch": "of all workers together",
        "first": "the first seed: settings are chosen with others than those that are compared",
        "limit": "training examples to use; 0: all",
        "target": "accuracy whose cost is told; 0: none",
        "look": "examples between two looks at the accuracy",
    }
    for name in without:
        del settings[name]
    for name, value in settings.items():
        kind = str if value is None else type(value)
        parser.add_argument(f"--{name}", type=kind, default=value, help=told.get(name))
    parser.add_argument("--method", action="append", choices=list(methods), dest="methods")
    parser.add_argument("--anew", action="store_true", help="train also what was trained before")
    parser.add_argument("--bfloat16", action="store_true", help="forward passes under torch's autocast")
    options = vars(parser.parse_args())
    if not options["bfloat16"]:
        del options["bfloat16"]  # so that trainings from before there was this option are found
    chosen = options.pop("methods") or list(usual or methods)
    first, count, anew = options.pop("first"), options.pop("seeds"), options.pop("anew")
    seeds = range(first, first + count)
    done = Done(f"{question}-{options['task']}", anew)
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in chosen}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            for method in chosen:
                mine = options | {"workers": 1} if method in alone else options
                if (one := done.get(method, seed, mine) or done.get(method, seed, options)) is None:
                    file = Path(folder) / "found.json"
                    bench.launch(mine["workers"], train, make, method, mine, seed, str(file))
                    one = json.loads(file.read_text())
                    done.add(method, seed, mine, one)
                found[method].append(one)
                print(f"seed {seed}, {method}: {one}", flush=True)
    for method in chosen:
        print(_line(method, found[method], chosen[0], found[chosen[0]]))
    bench.report(f"{question}-{options['task']}", {"options": options, "methods": found})


class Done:
    """The trainings that there are in a file already, one on each line."""

    def __init__(self, name: str, anew: bool) -> None:
        self._file = bench.trainings_in() / f"{name}.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() and not anew else []
        self._records = [json.loads(line) for line in lines]

    def get(self, method: str, seed: int, settings: dict[str, Any]) -> dict[str, Any] | None:
        """What came of the last training with these settings; None if it was not done."""
        wanted = {"method": method, "seed": seed, "settings": settings}
        found = [one["found"] for one in self._records if wanted.items() <= one.items()]
        return found[-1] if found else None

    def add(self, method: str, seed: int, settings: dict[str, Any], found: dict[str, Any]) -> None:
        """Keep what came of one."""
        record = {"method": method, "seed": seed, "settings": settings, "found": found}
        with self._file.open("a") as file:
            print(json.dumps({**record, "time": time.strftime("%Y-%m-%d %H:%M")}), file=file)


def _line(method: str, found: list[dict[str, Any]], first: str, base: list[dict[str, Any]]) -> str:
    accuracies = [100 * one["accuracy"] for one in found]
    differences = [mine - 100 * other["accuracy"] for mine, other in zip(accuracies, base, strict=True)]
    spread = f"{min(accuracies):.2f} … {max(accuracies):.2f}"
    away = f"{min(differences):+.2f} … {max(differences):+.2f}"
    steps, examples = (statistics.mean(one[name] for one in found) for name in ("steps", "examples"))
    line = (
        f"{method:26s} {statistics.mean(accuracies):.2f} % ({spread}), against {first} "
        f"{statistics.mean(differences):+.2f} points ({away}), {steps:.0f} steps, {examples:.0f} examples"
    )
    reached = [one["to_target"] for one in found if one["to_target"]]
    if reached:
        line += f"; target in {len(reached)} of {len(found)}"
        line += "".join(f", {statistics.mean(each[key] for each in reached):.4g} {key}" for key in reached[0])
    diverged = sum(one.get("diverged", False) for one in found)
    line += f"; {diverged} of {len(found)} diverged" if diverged else ""
    return f"{line}, {statistics.mean(one['seconds'] for one in found):.0f} s"
