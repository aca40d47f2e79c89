"""What does a batch of 8, 16 and 32 times the base cost in accuracy, with AdaScale and with linear scaling?

Equal numbers of examples, so that the larger batch has as many steps fewer: see training.py. The paper lets AdaScale go
on until its scale-invariant steps are as many as those of the base, which takes more examples.
"""

from __future__ import annotations

from typing import Any

from torch import nn

import paceline as pl
from benchmarks.training import Roles, compare, momentum
from paceline.roles import LearningRate

SCALES = [8, 16, 32]
MICRO = 128
METHODS = ["base", *(f"{rule} x{scale}" for scale in SCALES for rule in ("linear", "adascale", "constant"))]


def make(method: str, options: dict[str, Any], model: nn.Module) -> Roles:
    """SGD with momentum, and a rule for the learning rate."""
    optimizer, base = momentum(options, model), options["batch"]
    if method == "base":
        return Roles(optimizer, base, micro=MICRO)
    rule, _, scale = method.partition(" x")
    rules: dict[str, LearningRate] = {
        "linear": pl.lr.Linear(base),
        "adascale": pl.lr.AdaScale(base),
        "constant": pl.lr.Constant(),
    }
    return Roles(optimizer, base * int(scale), lr=rules[rule], micro=MICRO)


if __name__ == "__main__":
    compare("adascale", __doc__, make, METHODS, task="cifar10", model="lenet", batch=64, lr=0.02)
