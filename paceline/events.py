"""What happens in a run: what recorders take, and files hold."""

from __future__ import annotations

import msgspec

from paceline.records import GradientStats, Progress

__all__ = ["Ended", "Event", "Gossiped", "Measured", "Remark", "Resumed", "Saved", "Started", "StepDone"]


class Event(msgspec.Struct, frozen=True, tag=True):
    """Something that happened in a run. ``time`` is in seconds since 1970."""

    time: float


class Started(Event, frozen=True):
    """The run began."""

    workers: int
    parameters: int
    """Trainable numbers in the model."""
    dataset: int
    """Examples in the data set (in all workers' together, if each has its own)."""
    settings: dict[str, str]
    versions: dict[str, str]
    target: Progress | None = None
    """Where the loop will end, for the display of the time left: the one field that is not zero counts."""


class StepDone(Event, frozen=True):
    """One step was done, or all steps of one round (``steps``). Lists have one entry for each worker.

    Under Gossip every worker tells of itself alone: what is said of rank 0 here is true of it.
    """

    step: int
    epoch: int
    examples: int
    """Examples used since the run began, this step included."""
    batch: int
    loss: float
    learning_rate: float
    seconds: float
    """From the start of this step to the start of the next, as rank 0 saw it."""
    counts: list[int]
    load_seconds: list[float]
    compute_seconds: list[float]
    wait_seconds: list[float]
    communicate_seconds: float
    """Time of the exchange itself, after the last worker had come."""
    bytes_sent: int
    """What rank 0 handed to the network layer in this step."""
    applied: bool
    """Whether the optimizer stepped (a ``GradScaler`` may skip it)."""
    stats: GradientStats | None = None
    steps: int = 1
    """The steps of the round: its examples, losses and seconds are sums or means over all of them."""
    drift: float | None = None
    """How far the workers' models were from their average, where they train apart."""
    efficiency: float | None = None
    """Examples per second over the sum of what the workers would do alone: 1 if nobody waits and nothing is sent.

    Between the ends of two exchanges; None where they go on in the background.
    """


class Measured(Event, frozen=True):
    """Numbers that the user gave to ``run.log``."""

    step: int
    values: dict[str, float]


class Remark(Event, frozen=True):
    """Something that a role has noticed: a worker that is a burden, say."""

    step: int
    text: str


class Gossiped(Event, frozen=True):
    """What a worker exchanged with others, one by one, since it last said so; only under ``sync.Gossip``."""

    step: int
    exchanges: int
    """That moved both models."""
    refusals: int
    """By partners that were busy."""
    timeouts: int
    """Exchanges that came to nothing, because the partner did not answer."""
    late: int
    """Of those that had timed out, such as were completed after all."""
    bits: float | None
    """For each number, on average; None without an exchange."""
    staleness: float | None
    """Steps between the model that was shown and the one that the correction was added to, on average."""
    distance: float | None
    """How far a model is from the mean of all: estimated by how far partners were apart."""
    spread: float | None
    """The same, measured over all members by the last ``run.consensus()`` in this time; None if there was none."""
    bytes_sent: int
    bytes_received: int
    unheard: int
    """Letters and connections that were not of this run."""
    members: int
    """That take part, as far as the worker knows, itself included."""
    examples: int
    """That all members have used, as far as it knows."""
    worker: int = 0
    """Who exchanged: every worker has a record of its own."""
    known: int = 1
    """Members that it has ever heard of, itself included: those beyond ``members`` are dead, away or just joining."""
    partner: int | None = None
    """Of the last exchange; None if there was none."""
    lost: int = 0
    """Of the timeouts, such as were for the partner to decide, who did not say: it may have moved."""
    wider: int = 0
    """Of the exchanges, such as took more bits than the codec's: partners were too far apart."""
    strangers: int = 0
    """Of what was unheard, connections without the run's key."""
    kernel: str | None = None
    """What computes the lattice; None in full precision."""


class Saved(Event, frozen=True):
    """A checkpoint was written."""

    step: int
    path: str
    bytes: int
    seconds: float


class Resumed(Event, frozen=True):
    """The run went on from a checkpoint."""

    step: int
    path: str
    workers_before: int


class Ended(Event, frozen=True):
    """The loop ended."""

    step: int
    examples: int
    reason: str
    """``done``, ``stopped``, ``left`` (the loop was left early), or the name of the error or signal."""
