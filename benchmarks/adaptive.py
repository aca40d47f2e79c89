"""How many steps does an adaptive batch save, and at what accuracy?

SGD, AdaGrad and AdaGradNorm, each with fixed batches, with the norm test and AdaScale's gain from the same sketches,
and with the norm test as published. Fixed larger batches with the gain beside them, which shows what the test adds to
it. For the two that divide by past gradients the gain multiplies the gradient, and beside it the rate, by the gain or
its root. Equal numbers of examples: see training.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import paceline as pl
from benchmarks.training import Roles, compare, momentum
from paceline.lr import Scales

START = 32
MICRO = 128  # of one worker: larger shares are done in pieces

Optimizers = Callable[[dict[str, Any], nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizers] = {
    "SGD": momentum,
    "AdaGrad": lambda options, model: torch.optim.Adagrad(model.parameters(), lr=options["adagrad"]),
    "AdaGradNorm": lambda options, model: pl.optim.AdaGradNorm(model.parameters(), lr=options["norm"]),
}
SETTINGS: dict[str, Any] = {"lr": 0.02, "adagrad": 0.16, "norm": 8.0, "eta": 0.7, "largest": 4096}
FIXED = [32, 128, 512, 2048, 4096]
METHODS = [f"{name}, {what}" for name in OPTIMIZERS for what in ("fixed 32", "adaptive", "published")]
METHODS += [f"{name}, fixed {size}" for size in FIXED[1:] for name in OPTIMIZERS]
ALONE = [method for method in METHODS if ", fixed " in method]
METHODS += [f"SGD, gain {size}" for size in FIXED[1:]]
METHODS += [f"{name}, {what}" for name in ("AdaGrad", "AdaGradNorm") for what in ("rate", "root")]


def make(method: str, options: dict[str, Any], model: nn.Module) -> Roles:
    """The optimizer, and what decides about the batch."""
    name, _, what = method.partition(", ")
    optimizer = OPTIMIZERS[name](options, model)
    if what in ("adaptive", "rate", "root"):
        policy = pl.batch.NormTest(start=START, limit=options["largest"], eta=options["eta"])
        power = 0.5 if what == "root" else 1.0
        scales = Scales.GRADIENT if what == "adaptive" and name != "SGD" else Scales.RATE
        return Roles(optimizer, policy, lr=pl.lr.AdaScale(base=START, power=power, scales=scales), micro=MICRO)
    if what == "published":
        return Roles(
            optimizer,
            pl.batch.NormTest.as_published(start=START, limit=options["largest"], eta=options["eta"]),
            micro=MICRO,
        )
    kind, _, size = what.partition(" ")
    rule = pl.lr.AdaScale(base=START) if kind == "gain" else pl.lr.Constant()
    return Roles(optimizer, int(size), lr=rule, micro=MICRO)


if __name__ == "__main__":
    compare("adaptive", __doc__, make, METHODS, without=["batch"], alone=ALONE, epochs=8, **SETTINGS)
