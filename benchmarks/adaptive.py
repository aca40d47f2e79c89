"""How many steps does an adaptive batch save, and at what accuracy?

SGD, AdaGrad and AdaGradNorm, each with a fixed batch, with the norm test and AdaScale's gain from the same sketches,
and with the norm test as published; fixed larger batches beside them. Equal numbers of examples: see training.py. For
each optimizer the learning rate is the one for the small batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import paceline as pl
from benchmarks.training import Roles, compare, momentum

START, LIMIT, ETA = 32, 4096, 0.7
MICRO = 128  # of one worker: larger shares are done in pieces

Optimizers = Callable[[dict[str, Any], nn.Module], torch.optim.Optimizer]

# Usual values for the small batch; none was searched for.
OPTIMIZERS: dict[str, Optimizers] = {
    "SGD": momentum,
    "AdaGrad": lambda options, model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "AdaGradNorm": lambda options, model: pl.optim.AdaGradNorm(model.parameters(), lr=2.0),
}
FIXED = [32, 128, 512, 2048]
METHODS = [f"{name}, {what}" for name in OPTIMIZERS for what in ("fixed 32", "adaptive", "published")]
METHODS += [f"SGD, fixed {size}" for size in FIXED[1:]]


def make(method: str, options: dict[str, Any], model: nn.Module) -> Roles:
    """The optimizer, and what decides about the batch."""
    name, _, what = method.partition(", ")
    optimizer = OPTIMIZERS[name](options, model)
    if what == "adaptive":
        policy = pl.batch.NormTest(start=START, limit=LIMIT, eta=ETA)
        return Roles(optimizer, policy, lr=pl.lr.AdaScale(base=START), micro=MICRO)
    if what == "published":
        return Roles(optimizer, pl.batch.NormTest.as_published(start=START, limit=LIMIT, eta=ETA), micro=MICRO)
    return Roles(optimizer, int(what.removeprefix("fixed ")), micro=MICRO)


if __name__ == "__main__":
    compare("adaptive", __doc__, make, METHODS, lr=0.02, epochs=8)
