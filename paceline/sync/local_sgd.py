"""Local SGD: every worker trains alone for a round of several steps, then the models are averaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.codec import Identity
from paceline.errors import LoopError, SettingError
from paceline.fleet import Fleet
from paceline.probe import Probe
from paceline.records import Note, Plan, Progress, combine
from paceline.replica import Replica
from paceline.sync.average import WeightedAverage
from paceline.sync.buffers import BufferAverage
from paceline.sync.every import Every, as_every
from paceline.sync.flat import Rider
from paceline.sync.notes import NotesTable
from paceline.sync.optimizer_state import Keep, OptimizerState
from paceline.sync.outer import MakeOptimizer, Outer

__all__ = ["LocalSGD"]


class LocalSGD:
    """Average the models of all workers at the end of every round, each weighted by the examples that it used.

    Parameters and floating-point buffers become sum_i n_i x_i / sum_i n_i, in one collective for each dtype. A loop
    that ends in the middle of a round averages what there is, with the weights that there are.

    Args:
        every: how long a round is: a number of steps, :class:`Examples`, or a schedule (:class:`PostLocal`,
            :class:`Ramp`).
        optimizer_state: what becomes of momentum and the like: :class:`Keep`, :class:`Average` or :class:`Reset`.
        outer: makes a second optimizer, which takes the change of a round as a gradient (:func:`nesterov` for
            DiLoCo, :func:`slow_momentum` for SlowMo).
    """

    def __init__(
        self,
        every: Every | int,
        *,
        optimizer_state: OptimizerState = Keep(),  # noqa: B008 (it is immutable)
        outer: MakeOptimizer | None = None,
    ) -> None:
        self.every = as_every(every)
        self.optimizer_state = optimizer_state
        self.outer = None if outer is None else Outer(outer)
        self.bytes_sent = 0
        self._attached = False
        self._note: Note | None = None
        self._steps = self._examples = 0
        self._scale = 1.0

    def __repr__(self) -> str:
        outer = "" if self.outer is None else ", outer=…"
        return f"LocalSGD({self.every!r}, optimizer_state={self.optimizer_state!r}{outer})"

    def attach(self, fleet: Fleet, replica: Replica, probe: Probe) -> None:
        """Begin to serve a run."""
        if self._attached:
            raise SettingError("this LocalSGD serves another run that is not closed; make one for each run")
        if replica.ddp is not None:
            raise SettingError(
                "DistributedDataParallel averages gradients in every step, which LocalSGD is there to avoid; give Run "
                "the bare module"
            )
        if probe.active:
            raise SettingError(
                "the probe compares the gradients of all workers in every step, which LocalSGD does not exchange; use "
                "AllReduce with roles that ask for gradient statistics"
            )
        self._attached = True
        self._fleet, self._replica = fleet, replica
        self._average = WeightedAverage(fleet, Identity())
        self._buffers = BufferAverage(replica)
        self._buffers.whole = lambda: self._average.whole
        self._notes = NotesTable(fleet.rank, fleet.size)
        if self.outer is not None:
            self.outer.begin(replica.parameters)

    def detach(self) -> None:
        """End to serve it."""
        self._attached = False

    @property
    def counts_backward(self) -> bool:
        """No."""
        return False

    def factor(self, plan: Plan, weight: float) -> float:
        """What a micro-batch's mean loss is multiplied by: its part of this worker's own examples."""
        return weight / plan.counts[self._fleet.rank]

    def around(self, plan: Plan, last: bool) -> AbstractContextManager[Any]:
        """Nothing is sent in a backward pass."""
        return nullcontext()

    def after_backward(self) -> float:
        """Nothing was sent."""
        return 0.0

    def collect(self, plan: Plan) -> None:
        """The gradients stay where they are."""

    def before_step(self, plan: Plan, note: Note) -> None:
        """The gradients are this worker's own. Without examples there are none, so that the optimizer does nothing."""
        self._pending = plan, note  # it counts when the step is over: who leaves before that has not done it
        parameters = self._replica.parameters
        if not note.weight:
            if note.examples:
                raise LoopError(
                    f"the weights given to step.backward in step {plan.step} add up to {note.weight}; under LocalSGD "
                    "they must be positive on every worker that has examples"
                )
            for parameter in parameters:
                parameter.grad = None
        elif note.weight != note.examples:
            gradients = [gradient for each in parameters if (gradient := each.grad) is not None]
            torch._foreach_mul_(gradients, note.examples / note.weight)

    def flat_gradients(self) -> Sequence[Tensor] | None:
        """They are in ``.grad`` alone."""
        return None

    def end_step(self, now: Progress, last: bool, busy_seconds: float) -> tuple[Note, ...] | None:
        """Average if the round ends with this step; gives the notes of the round then."""
        self._count(*self._pending)
        begin = Progress(now.step - self._steps, now.epoch, now.examples - self._examples)
        self.bytes_sent = 0
        if self._note is None or not (last or self.every.ends(begin, now)):
            return None
        return self._end_round(msgspec.structs.replace(self._note, busy_seconds=busy_seconds), now.step - 1)

    def leave(self, plan: Plan) -> tuple[Note, ...]:
        """Take part in the average that ends the round, with the examples that were used, and ask all to stop then."""
        if self._note is None:
            self._note, self._scale = Note(steps=0.0), float(plan.batch)
        return self._end_round(msgspec.structs.replace(self._note, stop=max(1.0, self._note.stop)), plan.step)

    def reload(self) -> None:
        """The replica was given new values, the same on all workers: a round begins with them."""
        self._begin_round()
        self._buffers.reset()
        if self.outer is not None:
            self.outer.begin(self._replica.parameters)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """The average of all workers' models as they are now; afterwards every worker has its own again."""
        buffers = [buffer for _, buffer in self._replica.buffers()]
        own = [tensor.detach().clone() for tensor in (*self._replica.parameters, *buffers)]
        averaged = [*self._replica.parameters, *(buffer for buffer in buffers if buffer.is_floating_point())]
        if self._note is not None and self._fleet.size > 1:
            mean = self._average.of(averaged, self._note.weight, self._scale, [], "the models of all workers")
            _assign(averaged, mean)
        for name, buffer in self._replica.buffers():
            if not buffer.is_floating_point():
                self._fleet.broadcast(buffer, f"rank 0's {name}")
        try:
            yield
        finally:
            _assign([*self._replica.parameters, *buffers], own)

    def state_dict(self) -> dict[str, Any]:
        """How far the round is, and what is the same on all workers."""
        return {
            "steps": self._steps,
            "examples": self._examples,
            "live_buffers": self._buffers.live,
            "outer": None if self.outer is None else self.outer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._buffers.live = list(state["live_buffers"])
        if self.outer is not None and state["outer"] is not None:
            self.outer.load_state_dict(state["outer"])

    def own_state(self) -> dict[str, Any]:
        """This worker's model in the middle of a round, and its optimizer."""
        module, round_is_open = self._replica.module, self._note is not None
        return {
            "steps": self._steps,
            "examples": self._examples,
            "scale": self._scale,
            "note": None if self._note is None else list(msgspec.structs.astuple(self._note)),
            "model": module.state_dict() if round_is_open else None,
            "extra": [p.detach() for _, p in self._replica.extra] if round_is_open else None,
            "buffers": self._buffers.state_dict(),
            "optimizer": self._replica.optimizer.state_dict(),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._steps, self._examples, self._scale = state["steps"], state["examples"], state["scale"]
        self._note = None if state["note"] is None else Note(*state["note"])
        if state["model"] is not None:
            self._replica.module.load_state_dict(state["model"])
            _assign([p for _, p in self._replica.extra], state["extra"])
        self._buffers.load_state_dict(state["buffers"])
        self._replica.optimizer.load_state_dict(state["optimizer"])

    def _count(self, plan: Plan, note: Note) -> None:
        if self._note is None:
            self._note, self._scale = note, float(plan.batch)
        else:
            self._note = combine(self._note, note)
        self._steps += 1
        self._examples += plan.batch

    def _begin_round(self) -> None:
        self._note = None
        self._steps = self._examples = 0

    def _end_round(self, note: Note, step: int) -> tuple[Note, ...]:
        self._notes.own = note
        self._fleet.doing(step, "averaging models")
        self._synchronise(note, f"the models after step {step}")
        self._begin_round()
        return self._notes.all

    def _synchronise(self, note: Note, what: str) -> None:
        optimizer, parameters = self._replica.optimizer, self._replica.parameters
        mean: Sequence[Tensor] = parameters
        if self._fleet.size == 1:
            self._notes.all = (self._notes.own,)
        else:
            tensors = [*parameters, *self.optimizer_state.averaged(optimizer)]
            self._buffers.share = note.weight / self._scale
            riders: list[Rider] = [self._buffers, self._notes]
            found = self._average.of(tensors, note.weight, self._scale, riders, what)
            self._buffers.finish(self._fleet, f"the buffers: {what}")
            self.bytes_sent = self._average.bytes_sent
            mean = found[: len(parameters)]
            _assign(tensors[len(parameters) :], found[len(parameters) :])
        if self.outer is not None:
            mean = self.outer.step(mean)
        if mean is not parameters:
            _assign(parameters, mean)
        self.optimizer_state.after(optimizer)


@torch.no_grad()
def _assign(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_([target.detach() for target in targets], list(values))
