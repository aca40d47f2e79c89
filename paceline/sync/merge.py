"""One model out of the workers' models: parameters, buffers, optimizer state, then the step of an outer optimizer."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from paceline.clock import reading
from paceline.codec import Identity
from paceline.fleet import Fleet
from paceline.group import Group
from paceline.records import GradientStats, Later, Meeting, Note, without_stop
from paceline.replica import Replica
from paceline.roles import Codec
from paceline.sync.average import Mean, WeightedAverage, assign
from paceline.sync.buffers import BufferAverage
from paceline.sync.counters import common, share
from paceline.sync.flat import Rider
from paceline.sync.notes import NotesTable
from paceline.sync.optimizer_state import Average, OptimizerState, Slot
from paceline.sync.outer import Outer
from paceline.sync.statistics import GradientSum, Measured

__all__ = ["Merge"]


class Merge:
    """Averages at once (:meth:`run`), or while the workers go on (:meth:`begin`, then :meth:`land`)."""

    def __init__(
        self,
        fleet: Fleet,
        group: Group,
        replica: Replica,
        codec: Codec,
        optimizer_state: OptimizerState,
        outer: Outer | None,
        gradients: GradientSum | None = None,
    ) -> None:
        self._fleet, self._group, self._replica = fleet, group, replica
        self._optimizer_state, self._outer = optimizer_state, outer
        self._average = WeightedAverage(group, codec)
        self._plain = WeightedAverage(fleet, Identity())
        self._notes = NotesTable(group.rank, group.size)
        self._gradients = gradients
        self.buffers = BufferAverage(replica)
        self.buffers.whole = lambda: self._average.whole
        self.flight: Flight | None = None
        """The average that is under way in the background."""
        self.blocked_seconds = 0.0
        """How long the last landing stood still."""
        self.bytes_sent = 0
        self.trained: set[int] = set()
        """The ids of the parameters that were trained at any time in the round; some may be frozen by now."""
        self.restart()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is averaged: what any worker may have changed."""
        return self._replica.trained(self.trained)

    def restart(self) -> None:
        """The replica's values are the same on all workers now."""
        self.flight = None
        self.trained = set()
        self.buffers.reset()
        self._average.begin(self._replica.parameters)
        if self._outer is not None:
            self._outer.begin(self._replica.parameters)

    def forget(self) -> None:
        """A codec has nothing to make up for."""
        self._average.forget()

    def close(self) -> None:
        """No more averages."""
        self._average.close()
        self._plain.close()

    def run(self, note: Note, measured: Measured | None, scale: float, what: str) -> Meeting:
        """Average now; all workers have the same afterwards. What each has ``measured`` is put together, too."""
        optimizer, parameters = self._replica.optimizer, self.parameters
        self.complete_state(self._group)
        tensors = [*parameters, *self._optimizer_state.averaged(optimizer)]
        if self._group.size == 1:
            mean, self._notes.all, apart = Mean(parameters, 1.0), (note,), None
            self._measure_alone(measured)
        else:
            self.buffers.share = note.weight / scale
            riders = [self.buffers, *self._tell(note, measured)]
            self._average.expect(parameters)
            self._average.prepare(tensors, len(parameters), riders)
            mean = self._average.of(tensors, note.weight, scale, riders, what)
            self.bytes_sent, apart = self._average.bytes_sent, self._average.apart
            self.bytes_sent += self.buffers.finish(self._group, f"the buffers: {what}")
            mean.write(tensors[len(parameters) :], first=len(parameters))
        if self._outer is not None and _worked(self._notes.all):
            assign(parameters, self._outer.step(mean.tensors()[: len(parameters)], parameters, self._notes.all))
        elif mean.views is not parameters:
            mean.write(parameters)
        self._average.begin(parameters)
        self._optimizer_state.after(optimizer)
        return Meeting(self._notes.all, apart, stats=self._stats())

    def _tell(self, note: Note, measured: Measured | None) -> list[Rider]:
        """What this worker tells the others."""
        self._notes.own = note
        if self._gradients is None:
            return [self._notes]
        self._gradients.own = measured
        return [self._notes, self._gradients]

    def _measure_alone(self, measured: Measured | None) -> None:
        if self._gradients is not None:
            self._gradients.own = measured
            numbers = np.empty(self._gradients.numel)
            self._gradients.write(numbers)
            self._gradients.read(numbers)

    def _stats(self) -> GradientStats | None:
        return None if self._gradients is None else self._gradients.stats(self._notes.all)

    def complete_state(self, group: Group) -> None:
        """Make room for state of the optimizer that others of the group have: who has had no gradient yet has none.

        A parameter may get its first one in any round, on some workers alone. So all are asked before every average:
        for a check sum, and for more where it differs.
        """
        state, optimizer = self._optimizer_state, self._replica.optimizer
        if not isinstance(state, Average) or group.size == 1:
            return
        told, what = msgspec.json.encode(state.layout(optimizer)), "the others' optimizer state"
        own = torch.tensor([zlib.crc32(told)], device=group.device)
        sums = own.new_empty(group.size)
        group.all_gather(sums, own, what)
        if len(set(sums.tolist())) > 1:
            found = group.share_bytes(told, what)
            state.complete(optimizer, [msgspec.json.decode(blob, type=list[Slot]) for blob in found])

    def begin(self, note: Note, measured: Measured | None, scale: float, what: str) -> None:
        """Let an average of the present parameters set off, and go on meanwhile. Buffers do not travel with it."""
        riders = self._tell(note, measured)
        parameters = self.parameters
        self._average.expect(parameters)
        if self._outer is not None:  # what is frozen would go on to move by its momentum
            self._outer.expect(self._replica.parameters)
        targets = [parameter.detach() for parameter in parameters]
        own = [target.clone() for target in targets]
        self._average.prepare(own, len(own), riders)

        def fly() -> tuple[Sequence[Tensor], Meeting]:
            mean = self._average.of(own, note.weight, scale, riders, what).tensors()
            return mean, Meeting(self._notes.all, self._average.apart, background=True, stats=self._stats())

        self.flight = Flight(parameters, targets, own, fly)

    def land(self) -> Meeting:
        """Wait for the average that is under way, and move by its distance from where this worker set it off.

        So what was learnt meanwhile is not lost.
        """
        assert self.flight is not None
        flight, self.flight = self.flight, None
        since = reading()
        mean, meeting = flight.arrive()
        self.blocked_seconds = reading() - since
        worked = _worked(meeting.notes)
        new: Sequence[Tensor] = mean
        if self._outer is not None and worked:
            new = self._outer.step(mean, flight.parameters, meeting.notes)
        self._average.begin(flight.parameters, new)
        with torch.no_grad():
            change = torch._foreach_sub(list(new), flight.own)
            torch._foreach_add_(flight.targets, change)
        self._optimizer_state.after(self._replica.optimizer)
        self.bytes_sent = self._average.bytes_sent
        return meeting

    def equalise(self, weight: float, scale: float) -> int:
        """Make parameters and buffers the weighted average over all workers, in full precision and to the bit.

        Counters become rank 0's. Gives the bytes that this worker sent for the average.
        """
        if self._fleet.size == 1:
            return 0
        tensors = [*self.parameters, *self.common_buffers()]
        self._plain.prepare(tensors, len(tensors), [])
        mean = self._plain.of(tensors, weight, scale, [], "the models of all workers")
        if mean.views is not tensors:
            mean.write(tensors)
        self.share_counters()
        return self._plain.bytes_sent

    def common_buffers(self) -> list[Tensor]:
        """The floating-point buffers that have the same shape on all workers; others (caches) stay their own."""
        return self._common({name: buffer for name, buffer in self._replica.buffers() if buffer.is_floating_point()})

    def share_counters(self) -> None:
        """Make the buffers that are not floating point rank 0's, where all have the same: all workers must call it."""
        if self._replica.buffered:
            share(self._fleet, self._replica.counters())

    def _common(self, own: dict[str, Tensor]) -> list[Tensor]:
        return common(self._fleet, own) if self._replica.buffered else []

    @contextmanager
    def consensus(self, weight: float, scale: float) -> Iterator[None]:
        """The average of all workers' models as they are now; afterwards every worker has its own again."""
        buffers = [buffer for _, buffer in self._replica.buffers()]
        tensors = [*self.parameters, *buffers]
        own = [tensor.detach().clone() for tensor in tensors]
        try:
            self.equalise(weight, scale)
            yield
        finally:
            assign(tensors, own)

    def state_dict(self) -> dict[str, Any]:
        """What is this worker's own: of an average that is under way, what it will bring."""
        flight = None
        if self.flight is not None:
            mean, meeting = self.flight.arrive()
            notes = tuple(map(without_stop, meeting.notes))
            flight = {
                "of": self._replica.places(map(id, self.flight.parameters)),
                "own": self.flight.own,
                "mean": list(mean),
                "meeting": msgspec.msgpack.encode(msgspec.structs.replace(meeting, apart=None, notes=notes)),
                "drift": None if meeting.apart is None else meeting.apart.value,
            }
        return {"buffers": self.buffers.state_dict(), "average": self._average.state_dict(), "flight": flight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self.buffers.load_state_dict(state["buffers"])
        self._average.load_state_dict(state["average"])
        if (flight := state["flight"]) is not None:
            drift, meeting = flight["drift"], msgspec.msgpack.decode(flight["meeting"], type=Meeting)
            apart = None if drift is None else Later(lambda: drift)
            found = flight["mean"], msgspec.structs.replace(meeting, apart=apart)
            parameters = self._replica.at(flight["of"])
            self.flight = Flight(parameters, [p.detach() for p in parameters], flight["own"], lambda: found)


def _worked(notes: Sequence[Note]) -> bool:
    """Whether anybody has: an average of nothing is no reason for an outer step."""
    return any(note.weight for note in notes)


class Flight:
    """An average that is under way in a thread of its own."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        targets: list[Tensor],
        own: list[Tensor],
        fly: Callable[[], tuple[Sequence[Tensor], Meeting]],
    ) -> None:
        self.parameters = parameters
        self.targets = targets
        """The parameters that it is an average of; others may be trained when it lands."""
        self.own = own
        """What this worker has given to it."""
        self._fly = fly
        self._found: tuple[Sequence[Tensor], Meeting] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-average", daemon=True)
        self._thread.start()

    def arrive(self) -> tuple[Sequence[Tensor], Meeting]:
        """Wait for the average and what came with it; every exchange in it has its deadline."""
        self._thread.join()
        if self._found is None:
            assert self._error is not None
            raise self._error
        return self._found

    def _run(self) -> None:
        try:
            self._found = self._fly()
        except BaseException as error:  # it belongs to the thread that waits
            self._error = error
