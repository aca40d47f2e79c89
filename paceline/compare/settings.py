"""The settings that ``paceline compare`` knows by name. To add one is a line in the table."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from paceline import recipes
from paceline.batch import NormTest
from paceline.lr import AdaScale
from paceline.sync import LocalSGD
from paceline.tasks.train import BATCH

__all__ = ["DEFAULTS", "SETTINGS"]

EVERY = 8  # steps between two averages of models
LIMIT = 8 * BATCH  # of a batch that grows
MICRO = 4  # examples that are compared, and ordered, together: a quarter of the share of one of four workers

SETTINGS: dict[str, Callable[[], Mapping[str, Any]]] = {
    "all-reduce": dict,
    "local-sgd": lambda: {"sync": LocalSGD(EVERY)},
    "local-sgd-8bit": lambda: recipes.slow_links(BATCH, every=EVERY),
    "gossip": lambda: recipes.unreliable(BATCH, every=EVERY, bind=_own_address()),
    "by-speed": lambda: recipes.uneven(BATCH),
    "norm-test": lambda: {"batch": NormTest(start=BATCH, limit=LIMIT, eta=0.7), "lr": AdaScale(base=BATCH, power=0.5)},
    "everything": lambda: {**recipes.everything(BATCH, LIMIT, MICRO), "lr": AdaScale(base=BATCH, power=0.5)},
}
"""What makes the arguments of ``Run`` that differ from the defaults, by name; called in every worker."""

DEFAULTS = ("all-reduce", "local-sgd", "gossip")
"""Those that are compared if none is named."""


def _own_address() -> str:
    """This worker's address, as the others see it: that of the interface on the way to rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        address: str = probe.getsockname()[0]
        return address
