"""Ordinary data parallelism: gradients are averaged in every step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from paceline.codec import Identity
from paceline.codec.lattice import refuse_lattice
from paceline.errors import LoopError, SettingError
from paceline.fleet import Fleet
from paceline.probe import Probe
from paceline.records import Meeting, Note, Plan, Progress
from paceline.replica import Replica
from paceline.role_check import asking
from paceline.roles import Codec, Need
from paceline.sync.buffers import BufferAverage
from paceline.sync.counters import share
from paceline.sync.exchange import Exchange
from paceline.sync.fitting import check_codec
from paceline.sync.notes import NotesTable
from paceline.sync.overlap import Overlap

__all__ = ["AllReduce"]


class AllReduce:
    """Average the gradients of all workers in every step, each weighted by the examples that it stands for.

    A plain module is averaged after its backward pass, in one flat buffer for each dtype, and its floating-point
    buffers with it. A module wrapped in ``DistributedDataParallel`` keeps DDP's overlap of communication and backward
    pass (only the last micro-batch synchronises), DDP's communication hook if one is set, and DDP's rule for
    buffers (rank 0's are broadcast). A step that leaves some worker without examples is averaged as for a plain
    module there, too.
    """

    waits_for_leavers = False
    replaceable = True
    """Whether another sync may go on from its checkpoint: its state is the rounding of its own sums, and no more."""

    def __init__(self, codec: Codec | None = None) -> None:
        self.codec: Codec = codec or Identity()
        check_codec(self.codec)
        refuse_lattice(codec, "AllReduce")
        if self.codec.feedback:
            raise SettingError(
                f"AllReduce does not keep what {type(self.codec).__name__} loses of a gradient until the next step, "
                "which may have another batch or loss scale; use Half or BFloat16, or LocalSGD with this codec"
            )
        self.bytes_sent = 0
        self._attached = False
        self._overlap: Overlap | None = None

    def __repr__(self) -> str:
        return f"AllReduce(codec={self.codec!r})"

    def refuse(self, roles: dict[str, object], always: bool, local_data: bool) -> None:
        """Batches that every worker decides about by its own gradients."""
        for name, role in asking(roles, (Need.OWN,)).items():
            raise SettingError(
                f"AllReduce takes the mean of all gradients, so that {name}={role!r} cannot give a worker a batch of "
                "its own; use LocalSGD with it, or batch.NormTest for all together, and no balance"
            )

    def attach(self, fleet: Fleet, replica: Replica, probe: Probe) -> None:
        """Begin to serve a run."""
        if self._attached:
            raise SettingError("this AllReduce serves another run that is not closed; make one for each run")
        self._fleet, self._replica = fleet, replica
        self._notes = NotesTable(fleet.rank, fleet.size)
        self._buffers = BufferAverage(replica)
        self._exchange = Exchange(fleet, replica, self.codec, [self._buffers, self._notes])
        if replica.ddp is not None and fleet.size > 1:
            if not isinstance(self.codec, Identity):
                raise SettingError(
                    f"DistributedDataParallel sends gradients itself, so {self.codec!r} would have no effect; give Run "
                    "the bare module, or use a communication hook of DDP"
                )
            self._overlap = Overlap(replica.ddp, probe)
        self._attached = True

    def detach(self) -> None:
        """End to serve it."""
        self._attached = False
        self._exchange.close()
        if self._overlap:
            self._overlap.detach()
            self._overlap = None

    @property
    def counts_backward(self) -> bool:
        """DDP does; a plain module does not."""
        return self._overlap is not None

    def factor(self, plan: Plan, weight: float) -> float:
        """What a micro-batch's mean loss is multiplied by, so that the plain mean over workers is the weighted one."""
        return weight * self._fleet.size / plan.batch

    def around(self, plan: Plan, last: bool) -> AbstractContextManager[Any]:
        """Under DDP only the last micro-batch synchronises."""
        if self._overlap is None:
            return nullcontext()
        self._overlap.begin()
        ddp = self._replica.ddp
        assert ddp is not None
        if last and _all_work(plan):
            return nullcontext()
        if ddp.static_graph:
            raise SettingError(
                "DistributedDataParallel(static_graph=True) cannot leave out the synchronisation of a micro-batch; use "
                "static_graph=False, or a micro that takes a worker's whole share at once"
            )
        return ddp.no_sync()

    def after_backward(self) -> float:
        """Seconds at the end of the backward pass that were communication, not computation."""
        if self._overlap is None or not self._overlap.ready_at:
            return 0.0
        return time.perf_counter() - self._overlap.ready_at

    def collect(self, plan: Plan) -> tuple[Sequence[Tensor], float] | None:
        """Put the gradients into the flat buffers, unless DDP has averaged them or there is nobody to average with."""
        if self._fleet.size == 1 or (self._overlap is not None and _all_work(plan)):
            return None
        if self._overlap is not None and not plan.counts[self._fleet.rank]:
            self._overlap.match_forward()
        scale = 1.0 / self._fleet.size
        self._exchange.pack(scale)
        return self._exchange.gradients, scale

    def before_step(self, plan: Plan, note: Note) -> tuple[Note, ...]:
        """Average the gradients, unless DDP has done so, and exchange the notes."""
        if self._overlap is not None and not self._overlap.times:
            note = msgspec.structs.replace(note, busy_seconds=0.0)
        self._notes.own = note
        what = f"the gradients of step {plan.step}"
        if self._fleet.size == 1:
            self._notes.all, self.bytes_sent = (note,), 0
        elif self._overlap is not None and _all_work(plan):
            numbers = np.empty(self._notes.numel)
            self._notes.write(numbers)
            table = torch.from_numpy(numbers).to(self._fleet.device)
            self._fleet.all_reduce(table, f"the notes of step {plan.step}")
            self._notes.read(table.cpu().numpy())
            self.bytes_sent = self._overlap.bytes_sent + self._fleet.bytes_to_sum(table)
        else:
            self._buffers.share = plan.counts[self._fleet.rank] / plan.batch
            self._exchange.run(what)
            self._buffers.finish(self._fleet, f"the buffers of step {plan.step}")
            self.bytes_sent = self._exchange.bytes_sent
        self._correct_weight(plan, sum(each.weight for each in self._notes.all))
        return self._notes.all

    def flat_gradients(self) -> Sequence[Tensor] | None:
        """The flat buffers of a plain module: every ``.grad`` is a view of them."""
        alone = self._fleet.size == 1 or self._replica.ddp is not None
        return None if alone else self._exchange.gradients

    def measures(self, progress: Progress, plan: Plan, due: bool) -> bool:
        """Whenever it is asked for: every step is an exchange."""
        return due

    def apart(self, progress: Progress) -> bool:
        """Never: every step is everybody's."""
        return False

    def end_step(self, now: Progress, last: bool, busy_seconds: float) -> None:
        """Nothing: the parameters are equal on all workers."""

    def leave(self, plan: Plan) -> Meeting:
        """Nobody can be met: every step needs every worker."""
        raise LoopError(f"the loop was left before step {plan.step}, which the others cannot do alone")

    def own_state(self) -> dict[str, Any]:
        """Nothing: all workers have the same."""
        return {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Nothing."""

    def reload(self) -> None:
        """The replica was given new values, the same on all workers."""
        self._buffers.reset()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """The model is the same on all workers anyway; only buffers that are not averaged are made rank 0's."""
        if self._replica.buffered:
            # Of a module wrapped in DDP nobody averages any.
            own = self._replica.counters() if self._overlap is None else dict(self._replica.buffers())
            share(self._fleet, own)
        yield

    def state_dict(self) -> dict[str, Any]:
        """Which buffers take part in the exchange: it decides their place in it, and so the rounding of sums."""
        return {"live_buffers": self._buffers.live}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._buffers.live = list(state["live_buffers"])

    def _correct_weight(self, plan: Plan, weight: float) -> None:
        """Sums of weighted losses were divided by the number of examples: divide by the weights instead."""
        if weight == plan.batch:
            return
        if not weight > 0:
            raise LoopError(
                f"the weights given to step.backward in step {plan.step} add up to {weight} over all workers; "
                "they must be positive"
            )
        gradients = [p.grad for p in self._replica.parameters if p.grad is not None]
        torch._foreach_mul_(gradients, plan.batch / weight)


def _all_work(plan: Plan) -> bool:
    return min(plan.counts) > 0
