"""What an order that learns from gradients is told, and when workers tell each other."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.fleet import Fleet
from paceline.machinery import Machinery
from paceline.order.fragments import Fragment
from paceline.probe import Probe
from paceline.records import Plan, Progress
from paceline.roles import Learner, Order

__all__ = ["Lessons"]

# Steps between two exchanges. A unit is a few hundred bytes, so what counts is how often workers wait for each other.
SELDOM = 32


class Lessons:
    """Between a run and its order; there are none for an order that does not learn.

    Args:
        order: that of the run.
        fleet: all workers.
        alone: they never meet, so that each learns from its own gradients, about its own data.
    """

    def __init__(self, order: Order, fleet: Fleet, alone: bool) -> None:
        self._learner = order if isinstance(order, Learner) else None
        self._fleet, self._alone = fleet, alone
        self._since = 0

    def begin(self, lengths: tuple[int, ...], first: Plan, probe: Probe) -> None:
        """The run begins with this plan."""
        if self._learner is None:
            return
        rank, size = self._fleet.rank, self._fleet.size
        if self._alone:
            rank, size, lengths = 0, 1, (lengths[rank],)
        self._learner.begin(rank, size, lengths, first.micro, probe)

    def mark(self, plan: Plan) -> Plan:
        """The plan with micro-batches that are units, and a check sum of the order that it is cut from."""
        if self._learner is None:
            return plan
        return msgspec.structs.replace(plan, unit=self._learner.unit, order=self._learner.digest)

    def see(self, fragments: list[Fragment]) -> None:
        """This worker has done so in a step that counts."""
        if self._learner is not None:
            self._learner.see(fragments)

    def learn(self, now: Progress, parts: Machinery) -> None:
        """All workers have come to the same place, or this one learns alone: let them tell each other if it is time."""
        if self._learner is not None and (now.step - self._since >= SELDOM or now.epoch > self._learner.epoch):
            self.exchange(now, parts)

    def exchange(self, now: Progress, parts: Machinery) -> None:
        """All workers tell each other what they have seen."""
        if self._learner is None:
            return
        with parts.clock.aside():
            blobs = self._share(self._learner.tell(), now)
            self._learner.hear(blobs, now)
        self._since = now.step
        parts.sync.bytes_sent += (len(blobs) - 1) * max(map(len, blobs))

    def _share(self, told: bytes, now: Progress) -> Sequence[bytes]:
        if self._alone:
            return [told]
        return self._fleet.share_bytes(told, f"what the order learns from the gradients until step {now.step}")
