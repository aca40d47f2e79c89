"""One optimizer step of one worker: its micro-batches, its gradients, its note."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import LoopError
from paceline.losses import Losses, checked_weight, refuse_what_is_not_finite
from paceline.machinery import Machinery
from paceline.meeting import compare_models, compare_plans, round_of
from paceline.memory import ran_out
from paceline.order.fragments import Fragment, fragments_of
from paceline.probe import Example
from paceline.records import Note, Plan, Progress, Round
from paceline.roles import Need
from paceline.telling import note_of, round_of_step

__all__ = ["Phase", "Step"]


class Phase(enum.Enum):
    """How far a step is."""

    NEW = "new"
    OPEN = "open"
    READY = "ready"
    APPLIED = "applied"
    CLOSED = "closed"


class Step:
    """One optimizer step: iterate over it for this worker's micro-batches, and call :meth:`backward` for each.

    When the iteration ends, every parameter's ``.grad`` is ready for the optimizer: the average over all examples of
    the step, on all workers, or over this worker's own in a local step.
    """

    def __init__(self, parts: Machinery, plan: Plan, ends_epoch: bool, future: Callable[[], Iterable[Plan]]) -> None:
        self.plan = plan
        """Who takes what in this step."""
        self.ends_epoch = ends_epoch
        """Whether this is the last step of its epoch; where workers go at their own pace, known after it."""
        self.round: Round | None = None
        """What is known of the step after the inner loop: the notes of all workers, gradient statistics.

        Where workers train apart, of a whole round: None, but in the step that ends it, after ``optimizer.step()``.
        """
        self.fragments: list[Fragment] = []
        """The gradients of units that this worker has seen, after the inner loop; where an order learns from them."""
        self.phase = Phase.NEW
        self._parts, self._future = parts, future
        self._fitting, self._pieces = plan, len(plan.pieces(parts.fleet.rank))
        self._seen = 0
        self._waiting_for_backward = 0
        self._examples = self._too_large = 0
        self._losses = Losses()
        self._witness: nn.Parameter | None = None
        self._hidden_exchange = 0.0
        self._loss = math.nan

    @property
    def index(self) -> int:
        """The number of the step, from 0."""
        return self.plan.step

    @property
    def epoch(self) -> int:
        """The epoch that it belongs to, from 0."""
        return self.plan.epoch

    @property
    def loss(self) -> float:
        """The mean loss of the step; known when the inner loop has ended.

        Where gradients are averaged, over the examples of all workers; in a local step, over this worker's own.
        """
        if self.phase in (Phase.NEW, Phase.OPEN):
            raise LoopError(f"the loss of step {self.index} is known when the loop over its micro-batches has ended")
        return self._loss

    def __iter__(self) -> Iterator[Any]:
        if self.phase is not Phase.NEW:
            raise LoopError(f"step {self.index} was iterated over twice; its micro-batches come once")
        if self._parts.lent:
            raise LoopError(
                f"step {self.index} was begun inside of run.consensus(), where the model is the average of all workers "
                "and each gets its own back at the end: what is learnt there is lost; evaluate there, and train outside"
            )
        self.phase = Phase.OPEN
        parts, plan = self._parts, self.plan
        parts.clock.start()
        parts.fleet.doing(self.index, "computing")
        self._witness = parts.replica.with_gradient()
        try:
            while True:
                yield from self._micro_batches(parts.memory.fit(plan))
                if not self._too_large:
                    break
                self._begin_again()
            self._finish()
        except GeneratorExit:
            raise  # the loop was left: the phase stays open, and the optimizer refuses to step
        except BaseException as error:
            parts.failure = type(error).__name__
            parts.fleet.fail(error)
            raise

    def _micro_batches(self, plan: Plan) -> Iterator[Any]:
        """One pass over this worker's examples; it ends early if memory does."""
        parts = self._parts
        if plan is not self.plan:
            self._fitting, self._pieces = plan, len(plan.pieces(parts.fleet.rank))
        parts.probe.begin(self._pieces, parts.looks(self.plan))
        for examples, batch in parts.feed.micro_batches(plan, lambda: map(parts.memory.fit, self._future())):
            parts.clock.loaded()
            self._seen += 1
            self._waiting_for_backward = self._examples = examples
            parts.probe.before(batch)
            with parts.sync.around(self.plan, last=self._seen == self._pieces):
                yield batch
            if self._too_large:
                return
            if self._waiting_for_backward:
                raise LoopError(
                    f"step.backward(loss) was not called for micro-batch {self._seen} of {self._pieces} in step "
                    f"{self.index}; call it once in every turn of the inner loop, `for batch in step:`, instead of "
                    "loss.backward()"
                )
            parts.clock.computed(self._hidden_exchange)
            self._hidden_exchange = 0.0

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Put the body of the inner loop into it, and a step that does not fit into the memory is done again.

        The same examples come again from the beginning, in pieces of half the size, and their gradients replace what
        there was: the step is the same as if it had fitted. This worker remembers the size, and tells the balance.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error) or self.phase is not Phase.OPEN or not self._examples:
                raise
            if self._parts.sync.counts_backward:
                raise LoopError(
                    f"memory ran out in step {self.index}, and a module wrapped in DistributedDataParallel cannot do a "
                    "step again; give Run the bare module, or a smaller micro"
                ) from error
            if self._examples < 2:
                raise LoopError(
                    f"memory ran out in step {self.index} with a single example; use another model"
                ) from error
            self._too_large, self._waiting_for_backward = self._examples, 0

    def _begin_again(self) -> None:
        parts = self._parts
        parts.memory.shrink(self._too_large, self.index)
        for parameter in parts.replica.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        self._seen = self._too_large = 0
        self._losses.clear()
        parts.clock.computed()

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Add the gradient of a micro-batch's mean loss.

        ``weight`` is what the mean was taken over: by default the examples of the micro-batch; for a loss that averages
        over tokens or pixels, their number. Sums and weights are added up over all micro-batches and workers and
        divided once, so any mixture is exact.
        """
        parts = self._parts
        weight = self._check(loss, weight)
        factor = parts.sync.factor(self.plan, weight)
        scaled = loss if factor == 1.0 else loss * factor
        scale = 1.0
        if parts.scaler is not None:
            scaled = parts.scaler.scale(scaled)
            scale = parts.scaler.get_scale() if parts.probe.looking else 1.0
        parts.probe.before_backward()
        since = time.monotonic()
        try:
            # A mean over nothing (padding alone) may be NaN, and so its gradient, even times zero: leave it out. Not
            # under DDP, which counts backward passes.
            if weight or parts.sync.counts_backward:
                scaled.backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if parts.fleet.size > 1 and (isinstance(error, dist.DistBackendError) or "gloo" in str(error)):
                raise parts.fleet.lost(f"the gradients of step {self.index}", since, error) from error
            raise
        self._hidden_exchange = parts.sync.after_backward()
        parts.probe.after_backward(weight, factor * scale)
        if self._witness is None:
            self._witness = parts.replica.with_gradient()
            if self._witness is None and weight:
                raise LoopError(
                    f"step.backward gave no parameter of the run's model a gradient in step {self.index}: the loss "
                    "comes from another model; compute it with the one that was given to Run"
                )
        self._losses.add(loss, weight)
        self._waiting_for_backward = 0

    @property
    def emptied(self) -> bool:
        """Whether somebody has taken away the gradients that there were."""
        return self._witness is not None and self._witness.grad is None

    def left_early(self, by: str = "") -> LoopError:
        """The error for a step whose inner loop has not come to its end; the other workers are told.

        ``by`` is the call that came too early, if it was one.
        """
        if self._too_large:
            told = f"memory ran out in step {self.index}; put step.attempt() into the loop over its micro-batches"
        else:
            what = f"{by} was called before the inner loop of" if by else "the inner loop was left in"
            told = (
                f"{what} step {self.index} {'had ended ' if by else ''}(after {self._seen} of {self._pieces} "
                "micro-batches), so its gradients are not averaged; let it run to its end, and put optimizer.step() "
                "behind it, one level to the left"
            )
        error = LoopError(told)
        self._parts.failure = type(error).__name__
        self._parts.fleet.fail(error)
        return error

    def _check(self, loss: Tensor, weight: float | None) -> float:
        where = f"in step {self.index}"
        if self.phase is not Phase.OPEN or not self._seen:
            raise LoopError(
                f"step.backward was called {where} outside of the loop over its micro-batches; write `for batch in "
                "step:` around the forward pass and step.backward"
            )
        if self._too_large:
            raise LoopError(
                f"memory ran out in micro-batch {self._seen} {where}, and step.backward is outside of step.attempt(); "
                "put the whole body of the inner loop into it"
            )
        if not self._waiting_for_backward:
            raise LoopError(
                f"step.backward was called twice for micro-batch {self._seen} {where}; add the losses and call it once"
            )
        if self.emptied:
            raise LoopError(
                f"optimizer.zero_grad() was called {where} inside of the loop over its micro-batches: what those "
                "before gave is lost, and a worker without examples never gets there; put it before that loop"
            )
        return checked_weight(loss, weight, self._waiting_for_backward, where)

    def _finish(self) -> None:
        parts, plan = self._parts, self.plan
        if Need.UNITS in parts.probe.now:
            images, single = parts.probe.order_images(), isinstance(parts.probe.unit, Example)
            self.fragments = fragments_of(self._fitting, parts.fleet.rank, self._losses.weights, images, single)
        note = note_of(parts, plan, self._losses)
        parts.fleet.doing(self.index, "averaging gradients")
        notes = parts.sync.before_step(plan, note)
        if notes is not None:
            parts.clock.exchanged()
            self._compare(notes)
            compare_models([note.skipped for note in notes], self.index - 1)
            self.round = round_of_step(parts, plan, notes)
            self._loss = self.round.loss
        else:
            self._loss = note.loss / note.weight if note.weight else math.nan
            if note.weight:
                self._refuse_what_is_not_finite({parts.fleet.rank: note.loss})
        parts.fleet.doing(self.index, "updating")
        self.phase = Phase.READY

    def end(self, now: Progress, last: bool) -> None:
        """The optimizer has stepped, or will not; ``now`` is the progress with this step, maybe the ``last``."""
        parts = self._parts
        parts.clock.rested()
        meeting = parts.sync.end_step(now, last, parts.clock.busy)
        if meeting is not None:
            parts.clock.exchanged()
            self._compare(meeting.notes)
            self.round = round_of(self.plan, meeting)

    def _compare(self, notes: tuple[Note, ...]) -> None:
        compare_plans(notes, self.index)
        self._refuse_what_is_not_finite(dict(enumerate([note.loss for note in notes])))

    def _refuse_what_is_not_finite(self, losses: dict[int, float]) -> None:
        if self._parts.scaler is None:  # a GradScaler expects overflow now and then, and skips such a step
            refuse_what_is_not_finite(losses, self.index)
