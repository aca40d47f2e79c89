"""The protocols of the roles: what a method must offer to take part in a run.

A role may also be :class:`Stateful` (it is saved and restored), an :class:`Observer` (it is shown every round),
and ask the probe for measurements (:class:`Asker`). All functions that decide something must be pure: they are called
on every worker, and ahead of time to prefetch, and must give the same answer for the same state.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from paceline.events import Event
from paceline.needs import Need
from paceline.records import Meeting, Note, Plan, Progress, Round

if TYPE_CHECKING:
    from paceline.fleet import Fleet
    from paceline.order.fragments import Fragment
    from paceline.probe import Probe
    from paceline.replica import Replica

__all__ = [
    "Asker",
    "Balance",
    "Batch",
    "Codec",
    "Counter",
    "Due",
    "Learner",
    "LearningRate",
    "Need",
    "Observer",
    "Order",
    "Patient",
    "Recorder",
    "Speaker",
    "Stateful",
    "Sync",
    "Unmet",
]


@runtime_checkable
class Stateful(Protocol):
    """Something with a state that belongs into a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """The state, made of plain values and tensors."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Take a state back."""


@runtime_checkable
class Observer(Protocol):
    """A role that learns from what happened."""

    def observe(self, round: Round) -> None:
        """See a finished round: the same one on all workers."""


@runtime_checkable
class Speaker(Protocol):
    """A role that notices things which belong into the record."""

    def remarks(self) -> list[str]:
        """What it has noticed since it was asked last, each a sentence; asked after every round."""


@runtime_checkable
class Asker(Protocol):
    """A role that needs measurements of the probe: in every step, unless it has a say in that (:class:`Due`)."""

    needs: frozenset[Need]


@runtime_checkable
class Counter(Protocol):
    """A learning-rate rule that counts what steps are worth."""

    def stepped(self, batch: int, steps: int) -> None:
        """The optimizer has done so many steps of this batch: on all workers, and the same on all."""


@runtime_checkable
class Due(Protocol):
    """A role that asks the probe in some steps only."""

    def due(self, progress: Progress) -> bool:
        """Whether the step that begins here has to be measured."""


class Order(Protocol):
    """Which examples come next."""

    foresees: bool
    """Whether the next epoch's order is known before this epoch ends, so that it can be prefetched."""

    def permutation(self, length: int, epoch: int, seed: int) -> Tensor:
        """The ids of all examples in the order of this epoch: int64, each exactly once."""


@runtime_checkable
class Learner(Protocol):
    """An :class:`Order` that learns from gradients, which workers tell each other; it asks for ``Need.UNITS``."""

    unit: int  # a micro-batch has examples of one unit of so many, unless it is 0
    epoch: int  # whose order it gives
    digest: int  # a check sum of that order, compared between workers

    def begin(self, rank: int, workers: int, lengths: tuple[int, ...], share: int, probe: Probe) -> None:
        """Begin to serve a run; ``share`` is the largest micro-batch of its first step."""

    def see(self, fragments: Sequence[Fragment]) -> None:
        """Take what this worker has seen in a step that counts."""

    def tell(self) -> bytes:
        """What this worker has seen since it was asked the last time, for all others."""

    def hear(self, blobs: Sequence[bytes], now: Progress) -> None:
        """Take what all workers have told, by rank; if ``now`` is in a new epoch, make its order."""


class Batch(Protocol):
    """How many examples a step takes, all workers together."""

    def size(self, progress: Progress) -> int:
        """The batch of the step that follows."""


class Balance(Protocol):
    """Who takes how many of the examples."""

    def split(self, batch: int, workers: int) -> Sequence[int]:
        """Whole shares that sum to ``batch``."""


class LearningRate(Protocol):
    """How the learning rate follows the batch."""

    def factor(self, progress: Progress, batch: int) -> float:
        """What the optimizer's learning rates are multiplied by in this step."""


class Codec(Protocol):
    """How numbers look on the wire."""

    feedback: bool
    """Whether the sender should keep what encoding loses, and add it to what it sends the next time."""

    def bytes_for(self, numel: int) -> int:
        """How many bytes the payload of so many float32 numbers has."""

    def encode(self, values: Tensor) -> Tensor:
        """What travels: a flat tensor, of uint8 unless the numbers travel as they are."""

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the values of a payload to ``out``, in the dtype that it has."""


class Sync(Protocol):
    """When, what and with whom to average."""

    bytes_sent: int
    """What this worker handed to the network layer in the last exchange."""

    waits_for_leavers: bool
    """Whether others can go on to the end of a round when a worker leaves the loop, and be met there."""

    @property
    def counts_backward(self) -> bool:
        """Whether every micro-batch must have a backward pass, even one of weight zero."""

    def attach(self, fleet: Fleet, replica: Replica, probe: Probe) -> None:
        """Begin to serve this run."""

    def detach(self) -> None:
        """Remove every hook that was set."""

    def around(self, plan: Plan, last: bool) -> AbstractContextManager[Any]:
        """What the forward and backward pass of one micro-batch runs in."""

    def factor(self, plan: Plan, weight: float) -> float:
        """What a micro-batch's loss is multiplied by before its backward pass."""

    def after_backward(self) -> float:
        """Seconds of the backward pass that has just ended that were communication."""

    def collect(self, plan: Plan) -> tuple[Sequence[Tensor], float] | None:
        """Called once after the last backward pass: lay this worker's gradients together for their journey.

        Gives the tensors that hold them and what they were multiplied by; None where they are only in ``.grad``.
        """

    def before_step(self, plan: Plan, note: Note) -> tuple[Note, ...] | None:
        """Make the gradients ready for the optimizer; the notes of all workers if they were exchanged for that."""

    def flat_gradients(self) -> Sequence[Tensor] | None:
        """The gradients after ``before_step`` in as few tensors as possible; None where they are only in ``.grad``."""

    def measures(self, progress: Progress, plan: Plan, due: bool) -> bool:
        """Whether the probe has to look at the step that begins here; ``due`` says whether a role asks for it."""

    def apart(self, progress: Progress) -> bool:
        """Whether each worker goes at its own pace in the round that begins here, so that numbers of steps differ."""

    def end_step(self, now: Progress, last: bool, busy_seconds: float) -> Meeting | None:
        """The step is over, whether the optimizer has stepped or a ``GradScaler`` has skipped it.

        ``now`` is the progress with this step, which is the ``last`` if the loop, or what this worker was dealt, ends
        with it. If a round of several steps ends here, what came of it is given. ``busy_seconds`` is what this worker
        has worked since the last exchange.
        """

    def leave(self, plan: Plan) -> Meeting:
        """This worker has left the loop while the others go on; ``plan`` is that of the next step.

        Take part in what the others are about to do, and give what comes of the round that ends with it. Only called
        if ``waits_for_leavers``.
        """

    def own_state(self) -> dict[str, Any]:
        """What only this worker has and a checkpoint must keep, so that it can go on exactly; empty if nothing."""

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Take that back."""

    def reload(self) -> None:
        """The replica was given new values, the same on all workers."""

    def consensus(self) -> AbstractContextManager[None]:
        """While inside, the model is the average of all workers' models; collective."""


@runtime_checkable
class Unmet(Protocol):
    """A :class:`Sync` whose workers never come together between the beginning and the end of the loop.

    Every worker goes through its share of every epoch at its own pace. Its plans, rounds and checkpoints are its own;
    how far all are, it knows by hearsay.
    """

    def join(self, deadline: float) -> Fleet:
        """Come together with those that begin, or to those that have begun already."""

    def progress(self, own: Progress, length: int) -> Progress:
        """How far all are, as far as this worker knows; ``length`` is the examples of an epoch."""

    def begin(self, own: Progress) -> None:
        """The loop begins."""

    def resumed(self, own: Progress | None) -> bool:
        """All that begin have looked for a checkpoint, each for its own, and this worker's is of that place, if any.

        Who has none gets a model of one that has. Whether the run goes on from something.
        """

    def events(self, step: int) -> list[Event]:
        """What happened between workers in the round that ends with this step."""

    def finish(self) -> None:
        """The loop ends: with the same model on all workers."""

    def rest(self) -> None:
        """The loop was left early by this worker; the others go on."""


@runtime_checkable
class Patient(Protocol):
    """A recorder that need not see every step at once: it gets it during the next exchange, which costs no time."""

    patient: bool


class Recorder(Protocol):
    """Something that keeps or shows the events of a run. Used on rank 0 only, unless workers never meet."""

    def record(self, event: Event) -> None:
        """Take one event."""

    def close(self) -> None:
        """Finish files and displays; may be called twice."""
