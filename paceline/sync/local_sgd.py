"""Local SGD: every worker trains alone for a round of several steps, then the models are averaged."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from paceline.clock import reading
from paceline.codec import Identity
from paceline.errors import SettingError
from paceline.fleet import Fleet
from paceline.group import Group, Part
from paceline.meeting import both, ends, pauses
from paceline.probe import Probe
from paceline.records import Meeting, Note, Plan, Progress
from paceline.replica import Replica
from paceline.roles import Codec, Need
from paceline.sync.average import assign
from paceline.sync.every import Every, as_every
from paceline.sync.fitting import refuse_roles, refuse_what_does_not_fit
from paceline.sync.local_round import LocalRound
from paceline.sync.local_step import LocalStep, own_gradients, own_part
from paceline.sync.merge import Merge
from paceline.sync.optimizer_state import Keep, OptimizerState
from paceline.sync.outer import MakeOptimizer, Outer
from paceline.sync.statistics import Measuring, RoundStatistics

__all__ = ["LocalSGD"]


class LocalSGD(LocalStep):
    """Average the models of all workers at the end of every round, each weighted by the examples that it used.

    Parameters and floating-point buffers become sum_i n_i x_i / sum_i n_i, in one collective for each dtype. A loop
    that ends in the middle of a round averages what there is, with the weights that there are.

    Args:
        every: how long a round is: a number of steps, :class:`Examples`, :class:`Seconds`, or a schedule
            (:class:`PostLocal`, :class:`Ramp`).
        optimizer_state: what becomes of momentum and the like: :class:`Keep`, :class:`Average` or :class:`Reset`.
        outer: makes a second optimizer, which takes the change of a round as a gradient: :class:`DiLoCo`,
            :class:`SlowMo`, or any function from parameters to an optimizer.
        codec: how the average looks on the wire; with one that loses something, changes of models travel.
        overlap: steps of the next round that are done while the average is under way; it is then applied as a
            correction.
        measuring: in which step of a round gradients are compared, where a role asks for statistics: they travel with
            the average as sketches.
    """

    waits_for_leavers = True

    def __init__(
        self,
        every: Every | int,
        *,
        optimizer_state: OptimizerState = Keep(),  # noqa: B008 (it is immutable)
        outer: MakeOptimizer | None = None,
        codec: Codec | None = None,
        overlap: int = 0,
        measuring: Measuring = Measuring.FIRST,
    ) -> None:
        self.every = as_every(every)
        self.optimizer_state = optimizer_state
        self.outer = None if outer is None else Outer(outer)
        self.codec: Codec = codec or Identity()
        self.overlap, self.measuring = overlap, measuring
        refuse_what_does_not_fit(self)
        self.bytes_sent = 0
        self._fleet: Fleet | None = None
        self._parts: list[Part] = []

    def __repr__(self) -> str:
        told = [repr(self.every), f"optimizer_state={self.optimizer_state!r}"]
        told += [] if self.outer is None else [f"outer={self.outer!r}"]
        told += [] if isinstance(self.codec, Identity) else [f"codec={self.codec!r}"]
        told += [f"overlap={self.overlap}"] if self.overlap else []
        told += [f"measuring={self.measuring}"] if self.measuring is not Measuring.FIRST else []
        return f"{type(self).__name__}({', '.join(told)})"

    def refuse(self, roles: dict[str, object], always: bool, local_data: bool) -> None:
        """What cannot be measured where models are averaged, and no gradients."""
        refuse_roles(self, roles, always)

    def attach(self, fleet: Fleet, replica: Replica, probe: Probe) -> None:
        """Begin to serve a run."""
        name = type(self).__name__
        if self._fleet is not None:
            raise SettingError(f"this {name} serves another run that is not closed; make one for each run")
        if replica.ddp is not None:
            raise SettingError(
                f"DistributedDataParallel averages gradients in every step, which {name} is there to avoid; give Run "
                "the bare module"
            )
        statistics = RoundStatistics(probe, self.measuring, self.overlap)
        self._round = LocalRound(self.every, statistics, whole_epochs=Need.UNITS in probe.needs)
        self._replica = replica
        if self.outer is not None:
            self.outer.forget()
        self.merge = self._make_merge(fleet)
        self._fleet = fleet
        self._begin_round()
        self._begin_to_count()

    def detach(self) -> None:
        """End to serve it."""
        self._fleet = None
        self.merge.close()
        for part in self._parts:
            part.close()
        self._parts = []

    @property
    def counts_changes(self) -> bool:
        """Whether the change of each parameter is counted from where a round began, so that none may come or go."""
        return self.outer is not None or not isinstance(self.codec, Identity)

    @property
    def kind(self) -> str:
        """Whose state it can take over: the momentum of one outer optimizer is nothing to another."""
        name = type(self).__name__
        return name if self.outer is None else f"{name} with outer {self.outer.kind}"

    @property
    def fleet(self) -> Fleet:
        """The fleet that it serves."""
        assert self._fleet is not None, "it serves no run"
        return self._fleet

    def factor(self, plan: Plan, weight: float) -> float:
        """What a micro-batch's mean loss is multiplied by: its part of this worker's own examples."""
        return own_part(plan, self.fleet.rank, weight)

    def before_step(self, plan: Plan, note: Note) -> None:
        """The gradients are this worker's own. Without examples there are none, so that the optimizer does nothing."""
        self._round.look(plan, note)
        parameters = self._replica.parameters
        self.merge.trained.update(map(id, parameters))
        own_gradients(parameters, plan, note, type(self).__name__)

    def measures(self, progress: Progress, plan: Plan, due: bool) -> bool:
        """In one step of a round, if something is due then: all workers meet at the end of the round."""
        return due and self._round.measures(progress, plan)

    def apart(self, progress: Progress) -> bool:
        """Where rounds are measured by the clock; decided when one begins."""
        return self.merge.flight is None and self._round.timed(progress)

    def end_step(self, now: Progress, last: bool, busy_seconds: float) -> Meeting | None:
        """Average if the round ends with this step, or let the average of the last round land."""
        self._round.count(self._replica.learning_rate)
        self._round.tally.worked(busy_seconds)
        meeting = self._end_step(now, last)
        if meeting is not None:
            self._begin_to_count()
        return meeting

    def _end_step(self, now: Progress, last: bool) -> Meeting | None:
        self.bytes_sent = 0
        over = last or self._round.over(now)
        landed = None
        if self.merge.flight is not None and (over or self._round.tally.steps >= self.overlap):
            landed = self._land()
            last = last or pauses(landed)
        if not (over or last):
            return landed
        note = self._round.told(self.merge.blocked_seconds, final=float(last))
        if not self.overlap:  # an average has landed all the same if a checkpoint of one that overlaps was resumed
            return both(landed, self._end_round(note, now.step - 1))
        self._set_off(note, now.step - 1)
        if last:
            landed = both(landed, self._land())
            self._equalise()
        return landed

    def leave(self, plan: Plan) -> Meeting:
        """Take part in the average that ends the round, with the examples that were used, and ask all to stop then."""
        self._round.agree_on_scale(plan)
        with self.fleet.patiently(self._parts):
            meeting = self._leave(plan)
        self._begin_to_count()
        return meeting

    def _leave(self, plan: Plan) -> Meeting:
        note = self._round.told(self.merge.blocked_seconds, leaves=True)
        landed = None if self.merge.flight is None else self._land()
        if not self.overlap:
            return both(landed, self._end_round(note, plan.step))
        return self._meet_once_more(landed, note, plan)

    def _meet_once_more(self, landed: Meeting | None, note: Note, plan: Plan) -> Meeting:
        # The others learn of it when that average lands; then all end the round that they are in.
        self._set_off(note, plan.step)
        landed = both(landed, self._land())
        if not any(each.final for each in landed.notes):
            self._set_off(Note(steps=0.0, final=1.0), plan.step)
            landed = both(landed, self._land())
        self._equalise()
        return landed

    def reload(self) -> None:
        """The replica was given new values, the same on all workers: a round begins with them."""
        self._begin_round()
        self._begin_to_count()
        self._round.forget()
        self.merge.restart()
        self.merge.forget()

    def consensus(self) -> AbstractContextManager[None]:
        """The average of all workers' models as they are now; afterwards every worker has its own again."""
        return self.merge.consensus(self._round.weight, self._round.scale or 1.0)

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all workers."""
        return {
            "live_buffers": self.merge.buffers.live,
            "outer": None if self.outer is None else self.outer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self.merge.buffers.live = list(state["live_buffers"])
        if self.outer is not None:
            self.outer.load_state_dict(state["outer"])

    def own_state(self) -> dict[str, Any]:
        """This worker's model in the middle of a round, and its optimizer."""
        module = self._replica.module
        differs = self._round.weight > 0 or self._round.tally.steps > 0 or self.merge.flight is not None
        return {
            **self._round.state_dict(),
            "trained": self._replica.places(self.merge.trained),
            "counters": list(self._replica.counters().values()),
            "model": module.state_dict() if differs else None,
            "extra": [p.detach() for _, p in self._replica.extra] if differs else None,
            "merge": self.merge.state_dict(),
            "optimizer": self._replica.optimizer.state_dict(),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._round.load_state_dict(state)
        if state["model"] is not None:
            self._replica.load(state["model"])
            assign([p for _, p in self._replica.extra], state["extra"])
        self._replica.load_counters(state["counters"])
        self.merge.trained = set(map(id, self._replica.at(state["trained"])))
        self.merge.load_state_dict(state["merge"])
        self._replica.optimizer.load_state_dict(state["optimizer"])

    def _begin_round(self) -> None:
        self._round.tally.clear()
        if not self.overlap:  # else the average of what was trained is still to land
            self.merge.trained = set()

    def _begin_to_count(self) -> None:
        """The clock of the run begins anew: after every meeting, and with another loop."""
        self._round.tally.met()

    def _make_merge(self, fleet: Fleet) -> Merge:
        group: Group = fleet
        if self.overlap and fleet.size > 1:  # what the training thread exchanges meanwhile must not come in between
            self._parts = [Part(fleet, list(range(fleet.size)))]
            group = self._parts[0]
        gradients = self._round.statistics.rider()
        return Merge(fleet, group, self._replica, self.codec, self.optimizer_state, self.outer, gradients)

    def _end_round(self, note: Note, step: int) -> Meeting:
        self.fleet.doing(step, "averaging models")
        measured, what = self._round.statistics.give(), f"the models after step {step}"
        meeting = self.merge.run(note, measured, self._round.scale, what)
        self.bytes_sent = self.merge.bytes_sent
        self._round.weight = 0.0
        self._begin_round()
        if ends(meeting.notes):
            self.merge.share_counters()
        return meeting

    def _set_off(self, note: Note, step: int) -> None:
        since = reading()
        self.merge.begin(note, self._round.statistics.give(), self._round.scale, f"the models after step {step}")
        self._round.tally.waited(reading() - since)  # before the first, all compare what they will average
        self._begin_round()

    def _land(self) -> Meeting:
        meeting = self.merge.land()
        self.bytes_sent += self.merge.bytes_sent
        return meeting

    def _equalise(self) -> None:
        """After the last average in the background: corrections are right up to rounding; now to the bit."""
        self.bytes_sent += self.merge.equalise(self._round.weight, self._round.scale)
        self.merge.restart()
        self._round.weight = 0.0
