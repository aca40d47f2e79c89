"""A local batch for every worker by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from paceline.balance import Even
from paceline.balance.rounding import largest_remainder
from paceline.batch.norm_test import NormTest
from paceline.errors import SettingError
from paceline.probe.stats import gradient_stats
from paceline.records import Note, Plan, Progress, Round
from paceline.roles import Need

__all__ = ["EachOwn"]


@dataclass
class EachOwn:
    """Under Local SGD every worker has a norm test of its own, and a local batch that follows it.

    Worker w compares the noise of its own gradient with the length of that, not with the length of everybody's mean:
    b_w is at least ``sigma_w^2 / (eta^2 |g_w|^2)``. For data that differs from worker to worker. It decides about the
    batch and about the shares, so give it to a run as both: ``Run(batch=own, balance=own, sync=LocalSGD(8), micro=…)``.
    Each worker needs two micro-batches in a step.

    Args:
        policy: the test; ``start`` and ``limit`` are those of one worker.
        workers: how many there are.
    """

    policy: NormTest
    workers: int

    needs: ClassVar[frozenset[Need]] = frozenset({Need.VARIANCE, Need.OWN})

    _own: list[NormTest] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.policy, NormTest):
            raise SettingError(f"EachOwn takes a NormTest, not {type(self.policy).__name__}")
        if not isinstance(self.workers, int) or self.workers < 1:
            raise SettingError(f"EachOwn: workers ({self.workers!r}) must be a whole number of at least 1")
        self._own = [replace(self.policy) for _ in range(self.workers)]

    def refuse(self, roles: dict[str, object], always: bool, local_data: bool) -> None:
        """Half of it: shares that follow it must be of batches that follow it."""
        if roles["batch"] is not roles["balance"]:
            raise SettingError(
                "EachOwn decides about the batch and about who takes how many, but the run has "
                f"batch={roles['batch']!r} and balance={roles['balance']!r}; make one EachOwn, and give it as batch "
                "and as balance"
            )

    @property
    def sizes(self) -> list[int]:
        """Every worker's present batch."""
        return [policy.size(Progress()) for policy in self._own]

    def size(self, progress: Progress) -> int:
        """All of them together."""
        return sum(self.sizes)

    def split(self, batch: int, workers: int) -> Sequence[int]:
        """Everybody's own; of fewer examples, in that proportion."""
        if workers != self.workers:
            raise SettingError(f"EachOwn was made for {self.workers} workers, but there are {workers}; tell it so")
        return largest_remainder(batch, self.sizes)

    def observe(self, round: Round) -> None:
        """Every worker's policy sees that worker alone."""
        for policy, note in zip(self._own, round.notes, strict=True):
            policy.observe(_alone(round, note))

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"own": [policy.state_dict() for policy in self._own]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back; with another number of workers, everybody begins with the mean size."""
        states = state["own"]
        if len(states) == self.workers:
            for policy, each in zip(self._own, states, strict=True):
                policy.load_state_dict(each)
            return
        total = sum(each["size"] for each in states)
        for policy, size in zip(
            self._own, Even().split(total * self.workers // len(states), self.workers), strict=True
        ):
            policy.load_state_dict({**states[0], "size": size})


def _alone(round: Round, note: Note) -> Round:
    """The round as if there were no other worker."""
    stats = None
    if note.measured:
        measured = Note(units=note.units, weight=note.measured, unit_sqnorm=note.unit_sqnorm)
        stats = gradient_stats([measured], note.own_sqnorm)
    plan = Plan(round.plan.step, round.plan.epoch, (0,), (int(note.examples),), round.plan.micro)
    return Round(plan, (note,), stats)
