"""What does it cost in accuracy to average seldom, or in few bits?

The same training by workers of this machine, with each method and several seeds: see training.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import paceline as pl
from benchmarks.training import Roles, compare, momentum
from paceline.roles import Sync

METHODS: dict[str, Callable[[int], Sync]] = {
    "all-reduce": lambda steps: pl.sync.AllReduce(),
    "H = 4": lambda steps: pl.sync.LocalSGD(4),
    "H = 16": lambda steps: pl.sync.LocalSGD(16),
    "H = 4 in the second half": lambda steps: pl.sync.LocalSGD(pl.sync.PostLocal(steps // 2, 4)),
    "H = 16 in the second half": lambda steps: pl.sync.LocalSGD(pl.sync.PostLocal(steps // 2, 16)),
    "H = 4, averaged momentum": lambda steps: pl.sync.LocalSGD(4, optimizer_state=pl.sync.Average()),
    "H = 16, averaged momentum": lambda steps: pl.sync.LocalSGD(16, optimizer_state=pl.sync.Average()),
    "H = 4, SlowMo": lambda steps: pl.sync.LocalSGD(4, outer=pl.sync.SlowMo()),
    "H = 16, SlowMo": lambda steps: pl.sync.LocalSGD(16, outer=pl.sync.SlowMo()),
    "H = 16, DiLoCo": lambda steps: pl.sync.LocalSGD(16, outer=pl.sync.DiLoCo()),
    "H = 16, 8 bit": lambda steps: pl.sync.LocalSGD(16, codec=pl.codec.Uniform8()),
    "H = 16, half": lambda steps: pl.sync.LocalSGD(16, codec=pl.codec.Half()),
    "H = 16, overlap 8": lambda steps: pl.sync.LocalSGD(16, overlap=8),
    "all-reduce, half": lambda steps: pl.sync.AllReduce(codec=pl.codec.Half()),
    "gossip": lambda steps: pl.sync.Gossip(4, codec=pl.codec.Identity()),
    "gossip, 8 bit": lambda steps: pl.sync.Gossip(4),
    "gossip, 4 bit": lambda steps: pl.sync.Gossip(4, codec=pl.codec.Lattice(4)),
    "gossip, 8 bit, averaged momentum": lambda steps: pl.sync.Gossip(4, optimizer_state=pl.sync.Average()),
    "gossip of every step, 8 bit": lambda steps: pl.sync.Gossip(1),
}
"""What is made for so many steps."""
USUAL = ["all-reduce", "H = 4", "H = 16", "H = 16, 8 bit"]
MICRO = 32  # examples that stay in the cache: one worker alone does as many at once as each of four


def make(method: str, options: dict[str, Any], model: nn.Module) -> Roles:
    """SGD with momentum and a fixed batch."""
    steps = options["total"] // options["batch"]
    return Roles(momentum(options, model), options["batch"], METHODS[method](steps), micro=MICRO)


if __name__ == "__main__":
    compare("accuracy", __doc__, make, list(METHODS), USUAL, alone=["all-reduce"])
