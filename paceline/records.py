"""What flows between the parts: plans, notes and rounds."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec
from torch import Tensor

from paceline.ranges import Ranges, part, split_at_multiples

__all__ = [
    "Coordinates",
    "GradientStats",
    "Later",
    "Meeting",
    "Note",
    "Plan",
    "Progress",
    "Round",
    "combine",
    "combine_all",
    "without_stop",
]


class Progress(msgspec.Struct, frozen=True):
    """How far the run has come: what policies may look at to decide the next step."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Whole passes over the data done."""
    examples: int = 0
    """Examples used, by all workers together."""


class Plan(msgspec.Struct, frozen=True):
    """What every worker does in one step. All workers compute the same one."""

    step: int
    """The number of the step, from 0."""
    epoch: int
    """The pass over the data that it belongs to, from 0."""
    starts: tuple[int, ...]
    """For each worker, the position in the epoch's order where its examples begin."""
    counts: tuple[int, ...]
    """For each worker, how many examples it takes."""
    micro: int
    """The largest number of examples in one forward pass."""
    ranges: Ranges = ()
    """What is left of the epoch's order, where that is not simply the end of it: positions count from its beginning."""
    unit: int = 0
    """Examples whose gradient is seen on its own: no micro-batch goes beyond a multiple of it in the epoch's order."""
    order: int = 0
    """A check sum of the epoch's order, where that depends on gradients."""

    @property
    def batch(self) -> int:
        """The examples of the step, all workers together."""
        return sum(self.counts)

    def pieces(self, rank: int) -> list[tuple[int, int]]:
        """The micro-batches of a worker, as ``(start, stop)`` positions in the epoch's order.

        As few as ``micro`` and ``unit`` allow, of sizes that differ by at most one: a tiny remainder would be bad for
        batch statistics.
        """
        start, count = self.starts[rank], self.counts[rank]
        if not self.unit or not count:
            return _in_pieces(start, count, self.micro)
        lengths = split_at_multiples(self.spans(start, start + count), self.unit)
        parts = zip(accumulate(lengths, initial=start), lengths, strict=False)
        return [piece for first, length in parts for piece in _in_pieces(first, length, self.micro)]

    def spans(self, start: int, stop: int) -> Ranges:
        """Where in the epoch's order a micro-batch is."""
        return part(self.ranges, start, stop) if self.ranges else ((start, stop),)

    def digest(self) -> int:
        """A 32-bit check sum, which travels in the notes so that disagreement is noticed."""
        return zlib.crc32(msgspec.msgpack.encode(self))


def _in_pieces(start: int, count: int, most: int) -> list[tuple[int, int]]:
    if 0 < count <= most:  # nearly always
        return [(start, start + count)]
    number = -(-count // most)
    bounds = [start + count * at // number for at in range(number + 1)] if number else []
    return list(pairwise(bounds))


class Note(msgspec.Struct, frozen=True):
    """The numbers that one worker tells the others about a step."""

    plan: float = 0.0
    """Digest of the plan that it followed."""
    examples: float = 0.0
    """Examples that it used."""
    weight: float = 0.0
    """Weight of its gradient: its examples, or the weights given to ``step.backward``."""
    loss: float = 0.0
    """Sum of its losses, each times its weight."""
    stop: float = 0.0
    """Not zero if it wants everybody to stop after this step: 1, or the number of the signal it got."""
    save: float = 0.0
    """Not zero if a checkpoint is due after this step; rank 0's counts."""
    load_seconds: float = 0.0
    """Time spent on getting the data."""
    compute_seconds: float = 0.0
    """Time spent in the body of the loop, communication left out."""
    busy_seconds: float = 0.0
    """Everything between the end of the last exchange and the start of this one, but for the wait; 0 if not known.

    Where exchanges are in the background: this worker's own work in the steps of the round.
    """
    blocked_seconds: float = 0.0
    """Time that it stood still for the exchange before this one, where exchanges are in the background."""
    steps: float = 1.0
    """Steps that it did in the round; a worker that has left the loop did fewer than the others."""
    final: float = 0.0
    """Not zero if its loop ends with this round."""
    units: float = 0.0
    """Units (micro-batches or examples) whose gradients the probe saw."""
    unit_sqnorm: float = 0.0
    """Sum over its units of weight times squared gradient norm."""
    measured: float = 0.0
    """Weight of the step in which its own mean gradient was looked at, where rounds have several."""
    own_sqnorm: float = 0.0
    """Squared norm of that gradient."""
    most: float = 0.0
    """Examples that fit into its memory at once, if more did not; 0 if all did."""
    rate: float = 0.0
    """The mean learning rate of its steps, as the optimizer used it, where rounds have several steps."""
    skipped: float = 0.0
    """Not zero if its optimizer did not step in the step before."""


_LARGEST = frozenset({"stop", "save", "final"})


def combine_all(notes: Sequence[Note]) -> Note:
    """One note for steps of a worker, one after the other; what is no sum or maximum is that of the last."""
    if len(notes) == 1:
        return notes[0]
    names, columns = Note.__struct_fields__, zip(*map(msgspec.structs.astuple, notes), strict=True)
    found = {name: (max if name in _LARGEST else sum)(column) for name, column in zip(names, columns, strict=True)}
    digest = int(notes[0].plan)
    for note in notes[1:]:
        digest = zlib.crc32(int(note.plan).to_bytes(4, "big"), digest)
    last = {name: getattr(notes[-1], name) for name in ("busy_seconds", "most", "rate")}
    return Note(**{**found, "plan": digest, **last})


def combine(first: Note, second: Note) -> Note:
    """The same for two."""
    return combine_all((first, second))


def without_stop(note: Note) -> Note:
    """The same note of a worker that did not want to stop."""
    return msgspec.structs.replace(note, stop=0.0)


class GradientStats(msgspec.Struct, frozen=True):
    """What the probe found out about the gradient of one step, over all workers and units."""

    units: int
    """Units that the estimates rest on."""
    weight: float
    """The total weight (examples) of the units."""
    variance: float
    """Unbiased estimate of the trace of the covariance of one example's gradient; NaN with fewer than two units."""
    mean_sqnorm: float
    """Squared norm of the averaged gradient."""
    along: float | None = None
    """Of the variance, what is along the averaged gradient; None unless a role asks for it."""

    @property
    def signal(self) -> float:
        """Unbiased estimate of the squared norm of the true gradient (may be negative)."""
        return self.mean_sqnorm - self.variance / self.weight

    @property
    def noise_scale(self) -> float:
        """The simple gradient noise scale: variance over signal; infinite where no signal is seen."""
        if math.isnan(self.variance):
            return math.nan
        return self.variance / self.signal if self.signal > 0 else math.inf


class Later:
    """A number that is computed when somebody asks for it, once."""

    def __init__(self, compute: Callable[[], float]) -> None:
        self._compute = compute

    @cached_property
    def value(self) -> float:
        """It."""
        return self._compute()


class Meeting(msgspec.Struct, frozen=True):
    """What comes of an exchange at the end of several steps: the same on all workers."""

    notes: tuple[Note, ...]
    """One for each worker, summed over its steps."""
    apart: Later | None = None
    """How far the workers' models were from their average: root of the weighted mean square, estimated by sketches."""
    background: bool = False
    """Whether the exchange went on while workers did other steps."""
    stats: GradientStats | None = None
    """What the probe measured in one of the steps."""


class Coordinates(NamedTuple):
    """What is known of every coordinate of the gradient of a step, in a tensor for each parameter."""

    variances: list[Tensor]
    """Of one example's gradient."""
    means: list[Tensor]
    """The averaged gradient."""


class Round(msgspec.Struct, frozen=True):
    """What every worker knows after a synchronisation: the same on all of them."""

    plan: Plan
    """Of its last step; where each worker goes at its own pace, with the counts of a whole step of each."""
    notes: tuple[Note, ...]
    """One for each worker, by rank."""
    stats: GradientStats | None = None
    """What the probe measured, where a role asked for it."""
    apart: Later | None = None
    """See :attr:`drift`."""
    background: bool = False
    """Whether the exchange went on while workers did other steps."""
    coordinates: Coordinates | None = None
    """Variances of coordinates, where a role asked for them."""

    @property
    def drift(self) -> float | None:
        """How far the workers' models were from their average (:class:`Meeting`); None where they cannot differ."""
        return None if self.apart is None else self.apart.value

    @property
    def steps(self) -> int:
        """The steps of the worker that did most."""
        return int(max(note.steps for note in self.notes))

    @property
    def weight(self) -> float:
        """The total weight of the gradient."""
        return sum(note.weight for note in self.notes)

    @property
    def loss(self) -> float:
        """The weighted mean of the losses of all workers."""
        weight = self.weight
        return sum(note.loss for note in self.notes) / weight if weight else math.nan

    @property
    def waits(self) -> tuple[float, ...]:
        """Seconds that each worker waited for the slowest: all leave the last exchange together.

        Where the exchange is in the background, what each has stood still for it the last time.
        """
        if self.background:
            return tuple(note.blocked_seconds for note in self.notes)
        slowest = max(note.busy_seconds for note in self.notes)
        return tuple(slowest - note.busy_seconds for note in self.notes)
