"""What does a batch of 8, 16 and 32 times the base cost in accuracy, with AdaScale and with linear scaling?

Equal numbers of examples, so that the larger batch has as many steps fewer: see training.py. And as in the paper:
AdaScale until its scale-invariant steps are as many as those of the base, which takes more examples, with a schedule by
that count ("to the end").
"""

from __future__ import annotations

from typing import Any

from torch import nn

import paceline as pl
from benchmarks.training import Roles, compare, momentum
from paceline.roles import LearningRate

SCALES = [8, 16, 32]
MICRO = 128
RULES = ["linear", "adascale", "adascale to the end", "constant"]
METHODS = ["base", *(f"{rule} x{scale}" for scale in SCALES for rule in RULES)]
ALONE = [method for method in METHODS if not method.startswith("adascale")]


def make(method: str, options: dict[str, Any], model: nn.Module) -> Roles:
    """SGD with momentum, and a rule for the learning rate."""
    optimizer, base = momentum(options, model), options["batch"]
    if method == "base":
        return Roles(optimizer, base, micro=MICRO)
    rule, _, scale = method.partition(" x")
    gain = pl.lr.AdaScale(base)
    rules: dict[str, LearningRate] = {"linear": pl.lr.Linear(base), "constant": pl.lr.Constant()}
    worth = (lambda: gain.steps * base) if rule == "adascale to the end" else None
    return Roles(optimizer, base * int(scale), lr=rules.get(rule, gain), micro=MICRO, worth=worth)


if __name__ == "__main__":
    compare("adascale", __doc__, make, METHODS, alone=ALONE, task="cifar10", model="lenet", batch=64, lr=0.02)
