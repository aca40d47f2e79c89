"""In how many epochs does a learnt order reach what shuffling reaches?

    python -m benchmarks.ordering
    python -m benchmarks.ordering --task sst2 --streams 16

Logistic regression on 20,000 examples (Fashion-MNIST; SST-2 by its 2,000 most frequent words), one example of each
stream a step, constant learning rates from limited by optimisation to limited by noise. The streams are simulated in
one process with the parts that a run has, so that nothing but the order differs. With ``--processes`` every stream is a
worker, and the order that of its ``Run``, which may train another ``--model`` of the task. The figure is the first
epoch in which the training loss is at most the best that shuffling has reached in all its epochs, for each seed. Beside
it the herding bound of the last order, for the gradients of the model as it is at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import paceline as pl
from benchmarks import bench
from benchmarks.streams import Balanced, Seen, Shuffled, Streams
from benchmarks.training import PATIENCE, Done
from paceline import tasks
from paceline.order import WorkerStreams
from paceline.probe import Example
from paceline.roles import Order

__all__ = ["METHODS", "Seen", "herding", "summary", "train"]

TOGETHER = 64  # steps whose gradients are observed at once
RATES = {"fashion-mnist": (0.001, 0.004, 0.01, 0.02), "sst2": (0.04, 0.1, 0.4, 1.0)}
WORDS = 2000
SIZES = (64, 256, 1024, 4096)


def sketched(size: int, bits: int, parts: list[list[int]], seed: int) -> Streams:
    """CD-GraB from so many numbers of so many bits."""
    return Balanced(parts, True, size, bits)


METHODS: dict[str, Callable[[list[list[int]], int], Streams]] = {
    "shuffling": Shuffled,
    "flip-flop": lambda parts, seed: Shuffled(parts, seed, flip=True),
    "CD-GraB": lambda parts, seed: Balanced(parts, True),
    "ID-GraB": lambda parts, seed: Balanced(parts, False),
    **{f"CD-GraB, k = {size}, {bits} bits": partial(sketched, size, bits) for size in SIZES for bits in (8, 32)},
}
USUAL = ["shuffling", "flip-flop", "CD-GraB", "CD-GraB, k = 256, 8 bits", "ID-GraB"]
LEARNT = {
    "CD-GraB, k = 256, 8 bits": partial(pl.order.PairBalance, streams=WorkerStreams()),
    "CD-GraB, k = 64, 8 bits": partial(pl.order.PairBalance, streams=WorkerStreams(), sketch=64),
    "CD-GraB, k = 1024, 8 bits": partial(pl.order.PairBalance, streams=WorkerStreams(), sketch=1024),
}
ORDERS: dict[str, Callable[[], Order]] = {"shuffling": pl.order.Shuffle, "flip-flop": pl.order.FlipFlop, **LEARNT}
"""Those that workers have, in a ``Run``."""


def data(task: str, examples: int) -> tuple[Tensor, Tensor]:
    """Rows of inputs, the last of them 1, and classes."""
    dataset = tasks.load(task).train
    assert isinstance(dataset, TensorDataset)
    inputs, y = (each[:examples] for each in dataset.tensors)
    if task == "sst2":
        counts = torch.zeros(len(inputs), int(dataset.tensors[0].max()) + 1)
        counts.scatter_add_(1, inputs, (inputs > 0).float())
        inputs = counts[:, counts.sum(0).topk(WORDS).indices]
    return torch.cat([inputs.flatten(1).float(), torch.ones(len(inputs), 1)], 1), y


def train(method: str, options: dict[str, Any], seed: int, x: Tensor, y: Tensor) -> dict[str, Any]:
    """The training loss after each epoch, and the herding bound of the last."""
    count, rate = options["streams"], options["rate"]
    drawn = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).tolist()
    streams = METHODS[method]([drawn[at::count] for at in range(count)], seed)
    classes = int(y.max()) + 1
    wanted = F.one_hot(y, classes)
    weights = torch.zeros(x.shape[1], classes)
    losses = []
    for _ in range(options["epochs"]):
        orders = torch.tensor(streams.next_epoch())
        for few in torch.split(orders, TOGETHER, 1):
            errors = torch.empty(*few.shape, classes)
            for step in range(few.shape[1]):
                at = few[:, step]
                inputs = x[at]
                errors[:, step] = error = torch.softmax(inputs @ weights, 1) - wanted[at]
                weights.addmm_(inputs.T, error, alpha=-rate / count)
            for stream in range(count):
                streams.observe(Seen(x[few[stream]], errors[stream]), stream)
        losses.append(float(F.cross_entropy(x @ weights, y)))
    return {"losses": losses, "herding": herding(x, torch.softmax(x @ weights, 1) - wanted, orders)}


def herding(x: Tensor, errors: Tensor, orders: Tensor) -> float:
    """The herding bound of the gradients in these orders, without having all of them at once."""
    mean = (x.T.double() @ errors.double()).flatten() * (len(orders) / len(x))
    total, most = torch.zeros_like(mean), 0.0
    for few in torch.split(orders, TOGETHER, 1):
        steps = torch.stack([Seen(x[at], errors[at]).gradients().sum(0) for at in few.T])
        sums = total + (steps - mean).cumsum(0)
        total, most = sums[-1], max(most, float(sums.abs().max()))
    return most


class Job(NamedTuple):
    """What workers train."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    dataset: Dataset[Any]
    judge: Callable[[], float]
    """The training loss."""


def job(options: dict[str, Any], seed: int) -> Job:
    """The linear model, or one of the task's."""
    if options["model"]:
        task = tasks.load(options["task"])
        model = task.model(options["model"], seed=seed)
        known, examples = replace(task, test=task.train), options["examples"]
        dataset = Subset(task.train, range(examples))
        return Job(model, task.loss, dataset, lambda: known.evaluate(model, examples)["loss"])
    x, y = data(options["task"], options["examples"])
    linear = nn.Linear(x.shape[1], int(y.max()) + 1, bias=False)  # the inputs have a 1
    nn.init.zeros_(linear.weight)
    return Job(linear, entropy, TensorDataset(x, y), lambda: float(F.cross_entropy(linear(x).detach(), y)))


def entropy(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Of the classes that a linear model gives."""
    return F.cross_entropy(model(batch[0]), batch[1])


def work(method: str, options: dict[str, Any], seed: int, file: str) -> None:
    """The training of one of several workers; rank 0 writes what came of it."""
    model, loss, dataset, judge = job(options, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=options["rate"], momentum=options["momentum"])
    losses = []
    with pl.Run(
        model,
        optimizer,
        dataset,
        batch=options["batch"] or options["streams"],
        order=ORDERS[method](),
        probe=pl.Probe(unit=Example(loss)) if method in LEARNT and options["batch"] else None,
        seed=seed,
        deadline=PATIENCE,
    ) as run:
        for step in run.steps(epochs=options["epochs"]):
            optimizer.zero_grad()
            for batch in step:
                step.backward(loss(model, batch))
            optimizer.step()
            if run.progress.examples % options["examples"] == 0:
                losses.append(judge())
        if run.fleet.rank == 0:
            Path(file).write_text(json.dumps({"losses": losses}))


def in_processes(method: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """One training by as many workers as there are streams."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        bench.launch(options["streams"], work, method, options, seed, str(file))
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def summary(losses: dict[str, list[list[float]]]) -> dict[str, Any]:
    """By method and seed: the best loss, and the epoch that has reached shuffling's best; None if none has."""
    goals = [min(each) for each in losses["shuffling"]]
    rows: dict[str, Any] = {}
    for name, runs in losses.items():
        reached = [
            next((at + 1 for at, loss in enumerate(each) if loss <= goal), None)
            for each, goal in zip(runs, goals, strict=True)
        ]
        rows[name] = {"best": [round(min(each), 5) for each in runs], "reached": reached}
    return rows


def main() -> None:
    """Train, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="fashion-mnist")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--model", help="of the task, trained by workers; by default a linear one")
    parser.add_argument(
        "--batch", type=int, default=0, help="of all workers together, whose orders see single examples"
    )
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--rate", type=float, action="append", help="default: four of them")
    parser.add_argument("--method", action="append", choices=list(METHODS), dest="methods")
    parser.add_argument("--processes", action="store_true", help="a worker for each stream, in a Run")
    parser.add_argument("--anew", action="store_true", help="train also what was trained before")
    options = vars(parser.parse_args())
    if not options["processes"]:
        if options["model"] or options["batch"] or options["momentum"]:
            parser.error("--model, --batch and --momentum are for workers: add --processes")
        for name in ("model", "batch", "momentum"):
            del options[name]
        torch.set_num_threads(1)  # the steps are too small to share
    chosen, rates = options.pop("methods"), options.pop("rate") or RATES.get(options["task"])
    if not rates:
        parser.error("there are no usual rates for this task: give --rate")
    chosen = chosen or ([name for name in USUAL if name in ORDERS] if options["processes"] else USUAL)
    first, count = options.pop("first"), options.pop("seeds")
    done = Done(f"ordering-{options['task']}", options.pop("anew"))
    known = None if options["processes"] else data(options["task"], options["examples"])
    results: dict[str, Any] = {}
    for rate in rates:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
        settings = options | {"rate": rate}
        for seed in range(first, first + count):
            for name in chosen:
                if (one := done.get(name, seed, settings)) is None:
                    one = train(name, settings, seed, *known) if known else in_processes(name, settings, seed)
                    done.add(name, seed, settings, one)
                found[name].append(one)
        rows = summary({name: [one["losses"] for one in runs] for name, runs in found.items()})
        results[str(rate)] = rows
        print(f"learning rate {rate}: best training loss, herding bound (medians), epoch that reached shuffling's best")
        for name, row in rows.items():
            bounds = [one["herding"] for one in found[name] if "herding" in one]
            bound = f"{statistics.median(bounds):8.2f}" if bounds else ""
            print(f"  {name:26s} {statistics.median(row['best']):.5f} {bound}   {row['reached']}", flush=True)
    bench.report(f"ordering-{options['task']}", {"options": options, "rates": results})


if __name__ == "__main__":
    main()
