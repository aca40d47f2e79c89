"""In how many epochs does a learnt order reach what shuffling reaches?

    python benchmarks/ordering.py

Logistic regression on Fashion-MNIST, 20,000 examples, four streams of one example a step, constant learning rates from
limited by optimisation to limited by noise. The streams are simulated in one process with the parts that a run has, so
that nothing but the order differs. The figure is the first epoch in which the training loss is at most the best that
shuffling has reached in all its epochs, for each seed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks import bench
from paceline.order import PairBalancer
from paceline.probe.sketch import SignSketch
from paceline.tasks import fashion_mnist

STREAMS = 4
TOGETHER = 64  # steps whose gradients are observed at once
RATES = (0.001, 0.004, 0.01, 0.02)


class Streams(Protocol):
    """Gives the examples of every stream, epoch by epoch."""

    def next_epoch(self) -> list[list[int]]:
        """The orders of the epoch that begins."""

    def observe(self, gradients: Tensor, stream: int) -> None:
        """See the gradients (examples, numbers) of the next examples of a stream."""


class Shuffled:
    """Each stream its own examples, in a fresh order (D-RR), or in every other epoch the reverse (FlipFlop)."""

    def __init__(self, parts: list[list[int]], seed: int, flip: bool = False) -> None:
        self._parts, self._flip = parts, flip
        self._random = torch.Generator().manual_seed(seed)
        self._epoch = 0

    def next_epoch(self) -> list[list[int]]:
        """A fresh order, or the reverse of the last."""
        if self._flip and self._epoch % 2:
            self._parts = [part[::-1] for part in self._parts]
        else:
            fresh = [torch.randperm(len(part), generator=self._random).tolist() for part in self._parts]
            self._parts = [[part[at] for at in order] for part, order in zip(self._parts, fresh, strict=True)]
        self._epoch += 1
        return self._parts

    def observe(self, gradients: Tensor, stream: int) -> None:
        """It does not look at them."""


class Balanced:
    """CD-GraB, or with a sum for each stream ID-GraB; with sketches of so many numbers, or whole gradients."""

    def __init__(self, parts: list[list[int]], coordinated: bool, sketch: int | None = None) -> None:
        self._parts, self._sketch = parts, sketch
        self._balancer = PairBalancer(parts, coordinated=coordinated)
        self._map: SignSketch | None = None
        self._begun = False

    def next_epoch(self) -> list[list[int]]:
        """What the last epoch has taught."""
        if self._begun:
            self._parts = self._balancer.next_orders()
        self._begun = True
        return self._parts

    def observe(self, gradients: Tensor, stream: int) -> None:
        """Keep them, or what is left of them in 8 bits and so many numbers."""
        if self._sketch is not None:
            self._map = self._map or SignSketch(gradients.shape[1], self._sketch)
            gradients = torch.stack([self._map.of([row], [0]) for row in gradients])
            scale = gradients.abs().amax(1, keepdim=True) / 127
            gradients = torch.round(gradients / scale) * scale
        self._balancer.observe(gradients, stream)


METHODS: dict[str, Callable[[list[list[int]], int], Streams]] = {
    "shuffling": Shuffled,
    "flip-flop": lambda parts, seed: Shuffled(parts, seed, flip=True),
    "CD-GraB": lambda parts, seed: Balanced(parts, True),
    "CD-GraB, k = 256": lambda parts, seed: Balanced(parts, True, 256),
    "ID-GraB": lambda parts, seed: Balanced(parts, False),
}


def train(method: str, rate: float, seed: int, epochs: int, x: Tensor, y: Tensor) -> list[float]:
    """The training loss after each epoch."""
    drawn = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).tolist()
    streams = METHODS[method]([drawn[at::STREAMS] for at in range(STREAMS)], seed)
    weights = torch.zeros(x.shape[1], 10)
    found = []
    for _ in range(epochs):
        orders = torch.tensor(streams.next_epoch())
        for begin in range(0, orders.shape[1], TOGETHER):
            few = orders[:, begin : begin + TOGETHER]
            errors = torch.empty(*few.shape, 10)
            for step in range(few.shape[1]):
                inputs, target = x[few[:, step]], F.one_hot(y[few[:, step]], 10)
                error = torch.softmax(inputs @ weights, 1) - target
                errors[:, step] = error
                weights.addmm_(inputs.T, error, alpha=-rate / STREAMS)
            for stream in range(STREAMS):
                outer = x[few[stream]][:, :, None] * errors[stream][:, None, :]
                streams.observe(outer.flatten(1), stream)
        found.append(float(F.cross_entropy(x @ weights, y)))
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
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rate", type=float, action="append", help="default: four of them")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the steps are too small to share
    dataset = fashion_mnist.load().train
    assert isinstance(dataset, TensorDataset)
    images, labels = dataset.tensors
    x, y = images[: options.examples].flatten(1), labels[: options.examples]
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    results: dict[str, Any] = {}
    for rate in options.rate or RATES:
        losses: dict[str, list[list[float]]] = {name: [] for name in METHODS}
        for seed in range(options.seeds):
            for name in METHODS:
                losses[name].append(train(name, rate, seed, options.epochs, x, y))
        results[str(rate)] = {"summary": summary(losses), "losses": losses}
        print(f"learning rate {rate}: best training loss (median), epoch that reached shuffling's best by seed")
        for name, row in results[str(rate)]["summary"].items():
            print(f"  {name:20s} {statistics.median(row['best']):.5f}   {row['reached']}")
    bench.report("ordering", results)


if __name__ == "__main__":
    main()
