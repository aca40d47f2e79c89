"""What does an adaptive local batch save under Local SGD, in rounds and bytes to an accuracy?

Fixed small and large local batches, the large one also with AdaScale's gain; the norm test with a sketch that rides
with the average of the models, and the same with the whole gradient in its place, as the published method sends it.
Equal numbers of examples: see training.py.
"""

from __future__ import annotations

from typing import Any

from torch import nn

import paceline as pl
from benchmarks.training import Roles, compare, momentum

EVERY = 8
SMALL, LARGE = 64, 1024
METHODS = ["small", "large", "large, gain", "adaptive", "adaptive, whole gradient"]


def make(method: str, options: dict[str, Any], model: nn.Module) -> Roles:
    """Local SGD with momentum."""
    optimizer, local = momentum(options, model), pl.sync.LocalSGD(EVERY)
    if not method.startswith("adaptive"):
        rule = pl.lr.AdaScale(base=SMALL) if method == "large, gain" else pl.lr.Constant()
        return Roles(optimizer, SMALL if method == "small" else LARGE, local, rule)
    policy = pl.batch.NormTest(start=SMALL, limit=4 * LARGE, eta=options["eta"])
    probe = pl.Probe(exact=method.endswith("whole gradient"))
    return Roles(optimizer, policy, local, pl.lr.AdaScale(base=SMALL), probe=probe)


if __name__ == "__main__":
    compare("adaptive-local", __doc__, make, METHODS, without=["batch"], target=0.9, lr=0.02, epochs=8, eta=0.7)
