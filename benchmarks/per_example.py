"""What do units of single examples cost with taps on the layers, over gradients by plain ``torch.func``?

    python benchmarks/per_example.py

An MLP and a LeNet, batches of 64 random images, one thread. What an order needs of them (sketches) and what a norm test
needs (norms), as the probe takes it, and a user's own forward and backward pass: over the gradients by ``torch.func``
alone, and over these with their sketches, of the whole batch or of 16 examples at a time. All are interleaved in one
process. The probe has its default ``chunk_size`` of 16, with which it does the whole batch at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks import bench
from paceline.probe import Example, Probe
from paceline.probe.sketch import SIZE, map_of
from paceline.roles import Need
from paceline.tasks.models import MLP, LeNet

EXAMPLES = 64
CHUNK = 16
ROUNDS = 100
STEPS = 3
MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": lambda: MLP([784, 128, 10]), "lenet": lambda: LeNet(1, 28, 10)}
BASES = (
    "torch.func",
    "torch.func and sketches",
    "torch.func, 16 at a time",
    "torch.func and sketches, 16 at a time",
)
"""What the probe is compared with: gradients alone, the same result, and both with a quarter of the memory."""


def loss_of(model: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def by_probe(model: nn.Module, batch: tuple[Tensor, Tensor], need: Need) -> Callable[[], object]:
    """Units as a role asks for them."""
    probe = Probe(unit=Example(loss_of))
    probe.attach(model, list(model.parameters()), frozenset({need}))

    def measure() -> None:
        probe.begin(1, frozenset({need}))
        probe.before(batch)

    return measure


def by_torch_func(model: nn.Module, batch: tuple[Tensor, Tensor], chunk: int) -> Callable[[], Iterator[list[Tensor]]]:
    """Gradients alone, so many examples at a time."""
    values = {name: each.detach() for name, each in model.named_parameters()}

    def loss_of_one(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, values, (x.unsqueeze(0),)), y.unsqueeze(0))

    gradients = vmap(grad(loss_of_one), (None, 0, 0))

    def measure() -> Iterator[list[Tensor]]:
        for x, y in zip(*(torch.split(each, chunk) for each in batch), strict=True):
            yield list(gradients(values, x, y).values())

    return measure


def alone(every: Callable[[], Iterator[list[Tensor]]]) -> Callable[[], object]:
    """Form them, and forget them."""

    def measure() -> None:
        for _ in every():
            pass

    return measure


def with_sketches(model: nn.Module, every: Callable[[], Iterator[list[Tensor]]]) -> Callable[[], object]:
    """The same, and their sketches as the probe makes them of gradients that are there."""
    parameters = list(model.parameters())
    mapping = map_of(parameters, SIZE, 0)

    def measure() -> list[Tensor]:
        images = []
        for gradients in every():
            images.append(torch.zeros(len(gradients[0]), SIZE))
            offset = 0
            for gradient in gradients:
                mapping.add_rows(images[-1], gradient.flatten(1), offset)
                offset += gradient[0].numel()
        return images

    return measure


def measure(name: str, rounds: int) -> dict[str, dict[str, Any]]:
    """The probe's times of a batch, and their ratios to each of the bases."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = MODELS[name]()
    batch = torch.randn(EXAMPLES, 1, 28, 28), torch.randint(10, (EXAMPLES,))
    whole, pieces = (by_torch_func(model, batch, chunk) for chunk in (EXAMPLES, CHUNK))
    acts = [act for every in (whole, pieces) for act in (alone(every), with_sketches(model, every))]
    once: dict[str, Callable[[], object]] = {
        "sketches": by_probe(model, batch, Need.UNITS),
        "norms": by_probe(model, batch, Need.VARIANCE),
        "the user's passes": lambda: torch.autograd.grad(loss_of(model, batch), list(model.parameters())),
        **dict(zip(BASES, acts, strict=True)),
    }
    seconds = bench.interleave({key: repeated(act) for key, act in once.items()}, rounds, STEPS)
    own = [key for key in once if key not in BASES]
    return {f"{key} / {base}": bench.ratios(seconds, base)[key] for base in BASES for key in own}


def repeated(act: Callable[[], object]) -> bench.Block:
    """A block of so many times the same."""

    def block(steps: int) -> None:
        for _ in range(steps):
            act()

    return block


def compare(rounds: float) -> dict[str, Any]:
    """Measure all models, and show it."""
    results = {}
    for name in MODELS:
        results[name] = measure(name, max(2, round(rounds * ROUNDS)))
        bench.show(f"{name}, {EXAMPLES} examples, one thread", results[name])
    return results


def main() -> None:
    """Measure, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=float, default=1.0, help="multiple of the usual number of rounds")
    bench.report("per-example", compare(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
