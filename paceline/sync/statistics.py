"""Gradient statistics under Local SGD: a sketch of the mean gradient rides with the average of the models."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from torch import Tensor

from paceline.probe import Probe
from paceline.probe.stats import variance_from_sums, within_workers
from paceline.records import GradientStats, Note
from paceline.sync.notes import Numbers, split_halves

__all__ = ["GradientSum", "Measured", "Measuring", "RoundStatistics"]


class Measured(NamedTuple):
    """What a worker knows of its own mean gradient of one step."""

    weight: float
    image: Tensor
    """Its sketch, or all of it."""
    sqnorm: float
    """Its squared norm, exactly."""


class GradientSum:
    """Sums n_w S(g_w) over the workers w, with their mean gradients g_w over n_w examples and the sketch S.

    The sketch of the mean gradient gbar of all is that sum over N = sum n_w. With it everybody knows the spread::

        V = sum_w n_w |S(g_w)|^2 - N |S(gbar)|^2, which estimates sum_w n_w |g_w - gbar|^2 without bias,

    and, since the norms of the g_w are known exactly, |gbar|^2 = (sum_w n_w |g_w|^2 - V) / N. So the error of the
    sketch is relative to the spread alone, and no second vector travels.
    """

    SCALARS = 3

    def __init__(self, size: int, within: bool = False) -> None:
        self._within = within
        self.numel = 2 * self.SCALARS + size
        self.own: Measured | None = None
        """This worker's: set it before the exchange."""
        self._sums: tuple[float, float, float] = (0.0, 0.0, 0.0)
        self._image_sqnorm = 0.0

    def write(self, out: Numbers) -> None:
        """This worker's numbers; zeros if it has measured nothing."""
        out.fill(0.0)
        if self.own is None or not self.own.weight:
            return
        weight, image, sqnorm = self.own
        root = np.sqrt(weight) * image.double().cpu().numpy()
        scalars = (weight, weight * sqnorm, float(root @ root))
        out[: 2 * self.SCALARS] = np.concatenate(split_halves(scalars))
        # In units of the length of a gradient times a root: far from what single precision cannot hold.
        out[2 * self.SCALARS :] = np.sqrt(weight) * root

    def read(self, summed: Numbers) -> None:
        """Take the sums."""
        wide = summed.astype(np.float64)
        high, low, image = np.split(wide, [self.SCALARS, 2 * self.SCALARS])
        weight, exact, sketched = (high + low).tolist()
        self._sums = weight, exact, sketched
        self._image_sqnorm = float(image @ image) / weight**2 if weight else 0.0

    def stats(self, notes: Sequence[Note]) -> GradientStats | None:
        """The statistics; ``notes`` tell the units of the step and their sum of weight times squared norm."""
        weight, exact, sketched = self._sums
        if not weight:
            return None
        spread = sketched - weight * self._image_sqnorm
        mean_sqnorm = (exact - spread) / weight
        units = round(sum(note.units for note in notes))
        squares = sum(note.unit_sqnorm for note in notes)
        alike = variance_from_sums(units, weight, squares, mean_sqnorm)
        return GradientStats(units, weight, within_workers(notes) if self._within else alike, mean_sqnorm)


class Measuring(enum.Enum):
    """In which step of a round of Local SGD the gradients of the workers are compared."""

    FIRST = "first"
    """In the first: all workers have the same model then, so that what differs is noise.

    With averages in the background they never have; then in the first after the average of the last round has landed.
    """
    LAST = "last"
    """In the last, as published: workers have drifted apart by then, which counts as noise, too."""


class RoundStatistics:
    """Measures in one step of every round, and keeps that until the round ends."""

    def __init__(self, probe: Probe, measuring: Measuring, overlap: int = 0) -> None:
        self._probe, self._measuring, self._overlap = probe, measuring, overlap
        self._seen: Measured | None = None
        self._pending: Measured | None = None

    def rider(self) -> GradientSum | None:
        """What travels with an average; None if nothing is measured."""
        return GradientSum(self._probe.image_size, self._probe.within) if self._probe.statistics else None

    def wants(self, steps: int, last: bool) -> bool:
        """Whether to look at the step that begins after so many of the round, which may be its last."""
        if self._measuring is Measuring.LAST:
            return last
        return steps == self._overlap or (last and steps < self._overlap)

    def look(self, note: Note) -> Note:
        """The gradients of a step are in ``.grad``; gives the note of the step with what is known of them."""
        self._seen = Measured(*self._probe.own_mean()) if self._probe.measuring else None
        if self._seen is None:
            return note
        return msgspec.structs.replace(note, measured=self._seen.weight, own_sqnorm=self._seen.sqnorm)

    def count(self) -> None:
        """The step is over: what was seen in it belongs to the round."""
        self._pending, self._seen = self._seen or self._pending, None

    def give(self) -> Measured | None:
        """What was measured in the round that ends."""
        pending, self._pending = self._pending, None
        return pending

    def state_dict(self) -> dict[str, Any]:
        """In the middle of a round."""
        return {} if self._pending is None else self._pending._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        measured = Measured(**state) if state else None
        # Sketches of another size cannot be added to those of this run: the round goes without.
        fits = measured is not None and self._probe.statistics and measured.image.numel() == self._probe.image_size
        self._pending = measured if fits else None
