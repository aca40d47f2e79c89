"""The parts of a run that a step works with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.clock import Clock
from paceline.feed import Feed
from paceline.fleet import Fleet
from paceline.measure import Measure
from paceline.memory import Memory
from paceline.probe import Probe
from paceline.records import Plan
from paceline.replica import Replica
from paceline.roles import Need, Sync

__all__ = ["Machinery"]


@dataclass
class Machinery:
    """The parts of a run that a step works with."""

    fleet: Fleet
    feed: Feed
    sync: Sync
    probe: Probe
    measure: Measure
    clock: Clock
    memory: Memory
    replica: Replica
    scaler: torch.amp.GradScaler | None
    wishes: Callable[[], tuple[float, float]]
    """What this worker wants of all: ``(stop, save)`` for its note."""
    looks: Callable[[Plan], frozenset[Need] | None]
    """What the probe looks at in the step of this plan; None for nothing."""
    skipped: bool = False
    """Whether the optimizer did not step in the step before."""
    lent: bool = False
    """Whether a consensus lasts: the model is the average, and this worker's own is put away."""
    failure: str = ""
    """The name of the error that a step met with."""
