"""What all workers together know about the gradient of a step, once it was averaged."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

from paceline.group import Group
from paceline.probe import Probe
from paceline.probe.coordinates import coordinate_variances
from paceline.probe.stats import gradient_stats, spread_along, variance_along
from paceline.records import Coordinates, GradientStats, Note
from paceline.roles import Need
from paceline.sync.flat import FlatSum

__all__ = ["Measure"]


class Measure:
    """Puts the workers' measurements together: norms come with the notes, the rest in exchanges of its own."""

    def __init__(self, group: Group, probe: Probe) -> None:
        self._group, self._probe = group, probe
        self.bytes_sent = 0
        """What this worker handed to the network layer for the last step, beside the notes."""

    def stats(self, notes: Sequence[Note], mean_sqnorm: float, scale: float, step: int) -> GradientStats:
        """The statistics; ``.grad`` holds ``scale`` times the mean over all workers, whose squared norm is given."""
        within = self._probe.within
        stats = gradient_stats(notes, mean_sqnorm, within)
        self.bytes_sent = 0
        if Need.DIRECTION not in self._probe.now:
            return stats
        found = list(self._probe.towards_mean(scale))
        own = notes[self._group.rank]
        if within:  # each worker its part, and nobody has one if nobody has two units
            known = sum(note.weight for note in notes if note.units > 1)
            spread = spread_along(round(own.units), own.weight, *found)
            found = [own.weight / known * spread if own.units > 1 else 0.0 if known else math.nan, 0.0]
        sums = torch.tensor(found, dtype=torch.float64, device=self._group.device)
        self._group.all_reduce(sums, f"the directions of the gradients of step {step}")
        self.bytes_sent += self._group.bytes_to_sum(sums)
        first, second = sums.tolist()
        spread = first if within else spread_along(stats.units, stats.weight, first, second)
        return msgspec.structs.replace(stats, along=variance_along(stats, spread, self._probe.blur))

    def coordinates(self, stats: GradientStats, scale: float, step: int) -> Coordinates | None:
        """The variances of all coordinates, if somebody asks for them and there are two units."""
        if Need.COORDINATES not in self._probe.now or stats.units < 2:
            return None
        squares, means = self._probe.squares(), self._probe.mean(scale)
        total = FlatSum(self._group)
        total.lay_out(squares, 0, once=True)
        total.pack(squares, 1.0)
        total.run([], f"the squared gradients of step {step}")
        self.bytes_sent += total.bytes_sent
        variances = [
            coordinate_variances(square, mean.to(square.dtype), stats.units, stats.weight)
            for square, mean in zip(total.views, means, strict=True)
        ]
        return Coordinates(variances, means)
