"""What does it cost to learn an order from gradients, over shuffling?

    python benchmarks/order_overhead.py

Two workers train a convolutional network on random images, each with one and with four micro-batches in a step: runs
with ``PairBalance`` and ``GraB`` over the same run with ``Shuffle``. Beside them what the published code does: every
worker gets every other worker's whole gradient in every step, and replays the signs on it. Blocks of steps are
interleaved in the same processes. The bytes are those that a worker has sent, as the record tells them. At last, with
``--examples``, what single examples cost as units (per_example.py).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl
from benchmarks import bench, per_example
from paceline.events import Event, StepDone
from paceline.order import PairBalancer
from paceline.tasks.models import LeNet

EXAMPLES = 4096
BATCH = 64
FOREVER = 10**9
STEPS = 8  # an exchange every 32 steps is in every fourth block
STARTS = 4
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "lenet": (lambda: LeNet(1, 28, 10), 200),  # and how many rounds
    "cnn": (lambda: LeNet(1, 28, 10, (8, 16), (1200,)), 120),
}


class Bytes:
    """A recorder that adds up what is sent."""

    patient = False

    def __init__(self) -> None:
        self.sent = self.steps = 0

    @property
    def of_a_step(self) -> float:
        """The mean."""
        return self.sent / self.steps

    def record(self, event: Event) -> None:
        """Count a step."""
        if isinstance(event, StepDone):
            self.sent += event.bytes_sent
            self.steps += 1

    def close(self) -> None:
        """Nothing to finish."""


def by_run(model: nn.Module, dataset: TensorDataset, counted: Bytes, **settings: Any) -> bench.Block:
    """A run, as a user would write it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run = pl.Run(model, optimizer, dataset, batch=BATCH, record=[counted], **settings)
    return bench.training(run.steps(steps=FOREVER), model, optimizer)


def by_gathering(model: nn.Module, dataset: TensorDataset, counted: Bytes) -> bench.Block:
    """The published method beside a run that shuffles."""
    step, gather = by_run(model, dataset, counted), Gather(model)

    def block(steps: int) -> None:
        for _ in range(steps):
            step(1)
            counted.sent += gather()

    return block


class Gather:
    """The published method: whole gradients of all workers, in every step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        pairs = EXAMPLES // BATCH
        self._balancer = PairBalancer([list(range(pairs)) for _ in range(2)])
        self._left = pairs

    def __call__(self) -> int:
        """Gives the bytes."""
        own = torch.cat([p.grad.reshape(-1) for p in self._model.parameters() if p.grad is not None])
        found = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(found, own)
        for stream, gradient in enumerate(found):
            self._balancer.observe(gradient[None], stream)
        self._left -= 1
        if not self._left:
            self._left = len(self._balancer.next_orders()[0])
        return own.numel() * own.element_size()


def worker(name: str, start: int, rounds: int, out: str) -> None:
    """Measure one start of the processes."""
    torch.manual_seed(0)
    build, _ = MODELS[name]
    dataset = TensorDataset(torch.randn(EXAMPLES, 1, 28, 28), torch.randint(10, (EXAMPLES,)))
    pl.Fleet.join()
    pieces = BATCH // dist.get_world_size() // 4
    settings: dict[str, dict[str, Any]] = {
        "shuffle": {},
        "pairs": {"order": pl.order.PairBalance()},
        "mean": {"order": pl.order.GraB()},
        "shuffle, 4 pieces": {"micro": pieces},
        "pairs, 4 pieces": {"micro": pieces, "order": pl.order.PairBalance()},
    }
    counted = {key: Bytes() for key in [*settings, "gather"]}
    makers: dict[str, Callable[[], bench.Block]] = {
        key: partial(lambda key: by_run(build(), dataset, counted[key], **settings[key]), key) for key in settings
    }
    makers["gather"] = lambda: by_gathering(build(), dataset, counted["gather"])
    seconds = bench.interleave(bench.build(makers, start, STARTS), rounds, STEPS)
    if dist.get_rank() == 0:
        torch.save((seconds, {key: each.of_a_step for key, each in counted.items()}), out)


def measure(name: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Times and bytes of a step, and their ratios to the run that shuffles."""
    seconds: dict[str, list[float]] = {}
    sent: dict[str, float] = {}
    for start in range(STARTS):
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "out.pt")
            bench.launch(2, worker, name, start, rounds, out)
            found, sent = torch.load(out, weights_only=True)
            for key, times in found.items():
                seconds.setdefault(key, []).extend(times)
    rows: dict[str, dict[str, Any]] = {}
    for key in seconds:
        base = "shuffle, 4 pieces" if "pieces" in key else "shuffle"
        rows[key] = bench.ratios({base: seconds[base], key: seconds[key]}, base)[key]
        rows[key]["bytes of a step"] = round(sent[key])
        rows[key]["more bytes"] = round(sent[key] / sent[base] - 1, 5)
    return rows


def main() -> None:
    """Measure, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=float, default=1.0, help="multiple of the usual number of rounds")
    parser.add_argument("--model", choices=list(MODELS), action="append", help="default: both")
    parser.add_argument("--examples", action="store_true", help="single examples as units, too")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.model or MODELS:
        rows = measure(name, max(2, round(options.rounds * MODELS[name][1] / STARTS)))
        bench.show(f"{name}, 2 workers, batch {BATCH}, ratio to shuffling", rows)
        for key, row in rows.items():
            print(f"  {key:34s} {row['bytes of a step']:9d} bytes, {100 * row['more bytes']:.2f} % more")
        results[name] = rows
    if options.examples:
        results["examples"] = per_example.compare(options.rounds)
    bench.report("order-overhead", results)


if __name__ == "__main__":
    main()
