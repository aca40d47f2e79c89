"""Local SGD on two levels: often averaged inside of a site, seldom between sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from paceline.clock import reading
from paceline.codec import Identity
from paceline.errors import SettingError
from paceline.fleet import Fleet
from paceline.group import Part
from paceline.meeting import ends
from paceline.records import Later, Meeting, Note, Plan, Progress
from paceline.role_check import refuse_comparing
from paceline.roles import Codec
from paceline.sync.average import WeightedAverage, assign
from paceline.sync.every import Every, Steps, as_every, timed
from paceline.sync.local_sgd import LocalSGD
from paceline.sync.merge import Merge
from paceline.sync.notes import NotesTable
from paceline.sync.optimizer_state import Keep, OptimizerState
from paceline.sync.outer import MakeOptimizer
from paceline.sync.sites import find_sites, own_site
from paceline.sync.tally import Tally

__all__ = ["Hierarchical"]


class Hierarchical(LocalSGD):
    """Average inside of every site after short rounds, and between the sites after long ones.

    Only one worker of each site talks to the other sites, so that the links between them carry one model for each
    site. All averages are weighted by the examples that were used since the last one of their kind.

    Args:
        inside: how long a round inside of a site is.
        between: how long a round between sites is.
        site: the name of this worker's site; by default the variable ``PACELINE_SITE``, else the host's name.
        optimizer_state: as in :class:`LocalSGD`, at every average.
        outer: as in :class:`LocalSGD`, at the averages between sites.
        codec: how averages look on the wire between sites; inside they have full precision.
    """

    def __init__(
        self,
        inside: Every | int,
        between: Every | int,
        *,
        site: str | None = None,
        optimizer_state: OptimizerState = Keep(),  # noqa: B008 (it is immutable)
        outer: MakeOptimizer | None = None,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(as_every(between, "between"), optimizer_state=optimizer_state, outer=outer, codec=codec)
        self.inside = as_every(inside, "inside")
        if isinstance(self.inside, Steps) and isinstance(self.every, Steps) and self.inside.count > self.every.count:
            raise SettingError(
                f"inside ({inside}) is longer than between ({between}), so that a site would never meet alone; give "
                "the shorter round as inside, or use LocalSGD"
            )
        if timed(self.inside) or timed(self.every):
            raise SettingError("Hierarchical counts its rounds in steps or examples; Seconds is for LocalSGD")
        self._site = own_site(site)
        self._inside = Tally()
        self._inside_seconds = 0.0

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"({self.inside!r}, ", 1)

    def refuse(self, roles: dict[str, object], always: bool, local_data: bool) -> None:
        """What compares gradients."""
        refuse_comparing(roles, always, "under Hierarchical the workers of a site meet without the others")

    def detach(self) -> None:
        """End to serve it."""
        for average in (self._between, self._exactly_between, self._spread):
            average.close()
        super().detach()

    def _make_merge(self, fleet: Fleet) -> Merge:
        """That of this worker's site, and what is needed between sites."""
        sites = find_sites(fleet, self._site)
        self._sites = list(sites.values())
        self._parts = [Part(fleet, ranks) for ranks in self._sites]
        (self._here,) = [part for part in self._parts if part.rank >= 0]
        self._members = sites[self._site]
        self._leaders = Part(fleet, [part.first for part in self._parts])
        self._parts.append(self._leaders)
        self._table = NotesTable(fleet.rank, fleet.size)
        self._between = WeightedAverage(self._leaders, self.codec)
        self._exactly_between = WeightedAverage(self._leaders, Identity())
        self._spread = WeightedAverage(self._here, Identity())
        self._anchor(self._replica.parameters)
        return Merge(fleet, self._here, self._replica, Identity(), self.optimizer_state, None)

    def end_step(self, now: Progress, last: bool, busy_seconds: float) -> Meeting | None:
        """Average in the site if its round ends with this step, and between sites if that round does."""
        self._inside.add(*self._round.count(self._replica.learning_rate))
        self._round.tally.worked(busy_seconds - self._inside_seconds)
        over = last or self._round.over(now)
        if self._round.tally.steps == 1:
            self.bytes_sent = 0
        if not (over or self.inside.ends(self._inside.begin(now), now)):
            return None
        self._average_inside(self._inside.whole, now.step - 1, final=over)
        if not over:
            return None
        meeting = self._average_between(self._round.told(self.merge.blocked_seconds, final=float(last)), now.step - 1)
        self._begin_to_count()
        return meeting

    def _leave(self, plan: Plan) -> Meeting:
        """Take part in the averages of the site until the round between sites ends."""
        inside, whole = self._inside.whole, self._round.told(self.merge.blocked_seconds, leaves=True)
        while True:
            met = self._average_inside(inside, plan.step, left=True)
            # When all of a site have left, nobody is there to tell when the round ends: the other sites will.
            if any(note.final for note in met.notes) or all(note.stop for note in met.notes):
                return self._average_between(whole, plan.step)
            inside = Note(steps=0.0)

    def reload(self) -> None:
        """The replica was given new values, the same on all workers: rounds begin with them."""
        super().reload()
        self._between.forget()
        self._anchor(self._replica.parameters)

    def own_state(self) -> dict[str, Any]:
        """This worker's model in the middle of a round, and its optimizer."""
        return {
            **super().own_state(),
            "inside": self._inside.state_dict(),
            "between": self._between.state_dict(),
            "live_buffers": self.merge.buffers.live,  # not the same in all sites
            "sites": self._sites,
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Take that back, unless other workers are together now: then all begin a round from the average."""
        if state["sites"] != self._sites:
            return
        super().load_own_state(state)
        self.merge.buffers.live = list(state["live_buffers"])
        self._inside.load_state_dict(state["inside"])
        self._between.load_state_dict(state["between"])

    def _begin_round(self) -> None:
        super()._begin_round()
        self._inside.clear()

    def _begin_to_count(self) -> None:
        super()._begin_to_count()
        self._inside_seconds = 0.0

    def _anchor(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._leaders.rank >= 0:
            self._between.begin(parameters)
        if self.outer is not None:
            self.outer.begin(parameters)

    def _average_inside(self, note: Note, step: int, *, final: bool = False, left: bool = False) -> Meeting:
        self.fleet.doing(step, "averaging models in the site")
        # In the site "stop" says who has left: who only asks all to stop goes on until the sites meet.
        note = msgspec.structs.replace(note, final=float(final), stop=float(left))
        since = reading()
        met = self.merge.run(note, None, self._round.scale, f"the models of the site after step {step}")
        self._inside_seconds += reading() - since
        self.bytes_sent += self.merge.bytes_sent
        self._inside.clear()
        return met

    def _average_between(self, note: Note, step: int) -> Meeting:
        self.fleet.doing(step, "averaging models between sites")
        what = f"the models of the sites after step {step}"
        self._tell(note, what)
        parameters = self.merge.parameters
        self.merge.complete_state(self.fleet)  # sites may differ in it
        rest = self.merge.common_buffers()
        rest += self.optimizer_state.averaged(self._replica.optimizer)
        drift = torch.zeros(1, dtype=torch.float32, device=parameters[0].device)
        if self._leaders.rank >= 0 and self._leaders.size > 1:
            weight = sum(self._table.all[rank].weight for rank in self._members)
            self._between.expect(parameters)
            self._lead(self._between, parameters, weight, what)
            drift.fill_(self._between.apart.value)
            if rest:
                self._lead(self._exactly_between, rest, weight, f"the buffers: {what}")
        tensors = [*parameters, *rest, drift]
        self._spread.prepare(tensors, len(parameters), [])
        self._spread.of(tensors, float(self._here.rank == 0), 1.0, [], f"{what} from the first worker here").write(
            tensors
        )
        self.bytes_sent += self._spread.bytes_sent
        if self.outer is not None and any(each.weight for each in self._table.all):
            means = [p.detach().clone() for p in parameters]
            assign(parameters, self.outer.step(means, parameters, self._table.all))
        self._anchor(parameters)
        self.merge.restart()
        self._round.weight = 0.0
        self._begin_round()
        if ends(self._table.all):
            self.merge.share_counters()
        return Meeting(self._table.all, Later(drift.item) if self.fleet.size > 1 else None)

    def _tell(self, note: Note, what: str) -> None:
        """Give all workers the notes of all."""
        self._table.own = note
        numbers = np.empty(self._table.numel, dtype=np.float32)
        self._table.write(numbers)
        table = torch.from_numpy(numbers).to(self.fleet.device)
        self.fleet.all_reduce(table, f"the notes: {what}")
        self._table.read(table.cpu().numpy())
        self.bytes_sent += self.fleet.bytes_to_sum(table)

    def _lead(self, average: WeightedAverage, tensors: Sequence[Tensor], weight: float, what: str) -> None:
        average.prepare(tensors, len(tensors), [])
        mean = average.of(tensors, weight, self._round.scale, [], what)
        if mean.views is not tensors:
            mean.write(tensors)
        self.bytes_sent += average.bytes_sent
