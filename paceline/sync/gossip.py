"""Gossip: workers average their models in pairs, at their own pace, and nobody waits for anybody (SwarmSGD)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch

from paceline.codec import Identity, Lattice
from paceline.errors import LoopError, SettingError
from paceline.events import Event
from paceline.fleet import Fleet
from paceline.gossip.entrance import Entrance
from paceline.gossip.fitting import refuse_moments, refuse_roles, refuse_run, refuse_settings
from paceline.gossip.graph import Complete, Graph
from paceline.gossip.layout import Layout
from paceline.gossip.moments import Moments
from paceline.gossip.resuming import even_out
from paceline.gossip.sockets import check_bind
from paceline.gossip.start import Shape
from paceline.gossip.swarm import Swarm
from paceline.probe import Probe
from paceline.records import Meeting, Note, Plan, Progress
from paceline.replica import Replica
from paceline.sync.every import Every
from paceline.sync.local_step import LocalStep, own_gradients, own_part
from paceline.sync.optimizer_state import Average, Keep
from paceline.sync.own_rounds import Geometric, OwnRounds, WhileNear, as_own
from paceline.sync.tally import Tally

__all__ = ["Gossip"]


class Gossip(LocalStep):
    """Average with one random neighbour after every few steps, in the background, however far the neighbour is.

    Both move half of the way to each other, from where they were when they showed their models; what was learnt
    meanwhile stays. No worker waits, and one that dies is missed by nobody. When all workers together have reached the
    goal of the loop, the models of those alive become one, by the examples that each has used.

    Args:
        every: how many steps a worker does until it looks for a partner: a number, :class:`Seconds`,
            :class:`Geometric`, :class:`WhileNear`, or a schedule.
        graph: who may average with whom.
        codec: :class:`~paceline.codec.Lattice`, or :class:`~paceline.codec.Identity` for full precision.
        optimizer_state: momentum stays each worker's own (:class:`Keep`), or is averaged with the parameters
            (:class:`Average`; SGD, and in full precision Adam and AdamW), which makes letters as many times as long.
        blocking: stand still until the exchange is done. For comparison, and where steps are short.
        bind: ``HOST`` or ``HOST:PORT`` of this machine, where this worker listens; the others must be able to reach it.
        plain: neither encrypt nor ask for the run's key, in a network where everybody is trusted.
        invitation: a file with which a worker that is started again, alone, comes back to the run. It holds the key.
    """

    waits_for_leavers = False

    def __init__(
        self,
        every: Every | Geometric | WhileNear | int,
        *,
        graph: Graph = Complete(),  # noqa: B008 (it is immutable)
        codec: Lattice | Identity = Lattice(8),  # noqa: B008 (it is immutable)
        optimizer_state: Keep | Average = Keep(),  # noqa: B008 (it is immutable)
        blocking: bool = False,
        bind: str = "127.0.0.1",
        plain: bool = False,
        invitation: str | Path | None = None,
    ) -> None:
        self.every, self.graph, self.codec = as_own(every), graph, codec
        self.optimizer_state = optimizer_state
        self.blocking, self.bind, self.plain = blocking, bind, plain
        self._entrance = Entrance(invitation)
        refuse_settings(graph, codec, optimizer_state)
        check_bind(bind)
        self.bytes_sent = 0
        self._rank, self._serves = 0, False
        self._fleet: Fleet | None = None
        self._swarm: Swarm | None = None
        self._pending: tuple[Plan, Note] | None = None
        self._others, self._remarks = 0, list[str]()
        self._resumed: tuple[int, int] | None = None
        self._disturbed = False
        self._kernel = codec.kernel if isinstance(codec, Lattice) else None

    def __repr__(self) -> str:  # without where it listens, which is not the same on all workers
        told = [repr(self.every), f"graph={self.graph!r}", f"codec={self.codec!r}"]
        told += ["optimizer_state=Average()"] if isinstance(self.optimizer_state, Average) else []
        told += [f"{name}=True" for name in ("blocking", "plain") if getattr(self, name)]
        return f"Gossip({', '.join(told)})"

    def refuse(self, roles: dict[str, object], always: bool, local_data: bool) -> None:
        """What makes no sense where workers never come together."""
        refuse_roles(roles, always, local_data, invited=self._entrance.path is not None)

    def join(self, deadline: float) -> Fleet:
        """Come together with those that begin, or, with an invitation, to those that have begun already."""
        return self._entrance.join(deadline)

    def attach(self, fleet: Fleet, replica: Replica, probe: Probe) -> None:
        """Begin to serve a run. Until the first loop begins, all workers can come together."""
        if self._serves:
            raise SettingError("this Gossip serves another run that is not closed; make one for each run")
        refuse_run(fleet.size, replica)
        moments = None
        if isinstance(self.optimizer_state, Average):
            moments = Moments(replica.optimizer, set(map(id, replica.parameters)))
            refuse_moments(replica.optimizer, self.codec)
        self._rank, self._replica, self._layout = fleet.rank, replica, Layout(replica, moments)
        self._tally, self._rounds = Tally(), OwnRounds(self.every, fleet.rank)
        layout, counters = self._layout, self._layout.counters()
        shape = Shape(layout.numel, layout.more, counters.numel(), replica.shape(), self.codec, layout.measured)
        how = fleet, shape, counters, self.graph
        node = self._entrance.open(*how, blocking=self.blocking, bind=self.bind, plain=self.plain)
        strides, self._disturbed = isinstance(self.every, WhileNear), False
        self._swarm, self._serves, self._fleet = Swarm(node, layout, fleet.deadline, strides), True, fleet
        self._remarks = [] if self._kernel is None else [f"{self.codec!r} is computed by {self._kernel}"]
        try:
            self._swarm.join() if self._entrance.came_later else self._swarm.meet()
            fleet.gather(b"", "all workers to have reached each other")
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Say goodbye to the others."""
        self._pending, self._serves, self._fleet = None, False, None
        if self._swarm is not None:
            self._swarm.close()

    @property
    def swarm(self) -> Swarm:
        """The workers of the run that it serves, or served last."""
        assert self._swarm is not None, "it serves no run"
        return self._swarm

    def begin(self, own: Progress) -> None:
        """The loop begins: from now on others may average with this worker."""
        if self.swarm.finished:
            raise LoopError("the swarm has come to the end that all agreed on, and has parted; make a new Run to go on")
        if self._fleet is not None:
            self._fleet.disband()
            self._fleet = None
        self._rounds.enter(own)
        self._tally.met()
        self._others = self.swarm.others_examples
        self.swarm.begin()

    def factor(self, plan: Plan, weight: float) -> float:
        """What a micro-batch's mean loss is multiplied by: its part of this worker's own examples."""
        return own_part(plan, self._rank, weight)

    def before_step(self, plan: Plan, note: Note) -> None:
        """The gradients are this worker's own."""
        # Looked at once in a step: whether the goal is reached must not change between the step's end and the loop's.
        self._others = self.swarm.others_examples
        self._pending = plan, note  # it counts when the step is over: who leaves before that has not done it
        own_gradients(self._replica.parameters, plan, note, "Gossip")

    def measures(self, progress: Progress, plan: Plan, due: bool) -> bool:
        """Nothing is."""
        return False

    def apart(self, progress: Progress) -> bool:
        """Examples are not dealt: every worker goes through its own share of every epoch."""
        return False

    def end_step(self, now: Progress, last: bool, busy_seconds: float) -> Meeting | None:
        """Add what came of exchanges, show the model, and look for a partner if it is time."""
        assert self._pending is not None
        (plan, note), self._pending = self._pending, None
        self._tally.add(plan, note)
        self._tally.worked(busy_seconds)
        swarm, offers = self.swarm, self._rounds.over(now)
        swarm.step_done(int(note.examples), offers)
        if offers and self.blocking:
            swarm.stand_still()
        if not (offers or last or swarm.over or note.stop or note.save):
            return None
        whole, busy = self._tally.whole, self._tally.busy_seconds
        if offers:
            self._rounds.learn(swarm.distance(), swarm.stride)
            self._rounds.begin(now)
            self._entrance.keep(swarm.addresses)
        self._tally.clear()
        self._tally.met()
        stop = max(whole.stop, float(swarm.over))
        return Meeting((msgspec.structs.replace(whole, stop=stop, busy_seconds=busy),), background=True)

    def progress(self, own: Progress, length: int) -> Progress:
        """How far all workers together are, as far as this one has heard; steps are its own."""
        pending = 0 if self._pending is None else int(self._pending[1].examples)
        examples = self._others + self.swarm.examples + pending
        return Progress(own.step, examples // length, examples)

    def events(self, step: int) -> list[Event]:
        """What was exchanged since the last time."""
        event = self.swarm.event(step, self._kernel)
        self.bytes_sent = event.bytes_sent
        if event.unheard and not self._disturbed:
            self._disturbed = True
            self._remarks.append(
                "letters or connections have come that are not of this run, and were not heard; how many is in the "
                "record (unheard)"
            )
        return [event]

    def remarks(self) -> list[str]:
        """What was noticed since the last time: at the beginning, which kernel encodes."""
        said, self._remarks = self._remarks, []
        return said

    def finish(self) -> None:
        """All together have reached the goal, or one was told to stop: the models of those alive become one."""
        self.swarm.finish()
        self._others = self.swarm.others_examples
        self._entrance.close()

    def rest(self) -> None:
        """The loop was left: this worker's model is its own, and the others go on."""
        self.swarm.rest()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """The average of all models as they are now, which the others are asked for and go on; then the own again."""
        if self.swarm.finished:
            yield
            return
        own, mean = torch.empty(self._layout.numel + self._layout.more), self.swarm.mean()
        self._layout.read(own)
        self._layout.write(mean)
        try:
            yield
        finally:
            self._layout.write(own)

    def leave(self, plan: Plan) -> NoReturn:
        """Nobody is met."""
        raise AssertionError("it does not wait for who has left")

    def own_state(self) -> dict[str, Any]:
        """How far this worker is, and all of them; with what has come of exchanges, the model is ready to be saved."""
        swarm = self.swarm
        swarm.catch_up()
        return {
            "examples": swarm.examples_of_all_lives,
            "of_all": swarm.others_examples + swarm.examples,
            "rounds": self._rounds.state_dict(),
            "tally": self._tally.state_dict(),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._rounds.load_state_dict(state["rounds"])
        self._tally.load_state_dict(state["tally"])
        self._resumed = state["examples"], state["of_all"]

    def reload(self) -> None:
        """Whose model was given by a member keeps that one: a checkpoint's is older."""
        self.swarm.take_given()

    def resumed(self, own: Progress | None) -> bool:
        """Tell each other who has found a checkpoint; who has none gets a model of one that has."""
        assert self._fleet is not None, "the fleet has not been disbanded"
        (examples, of_all), self._resumed = self._resumed or (0, 0 if own is None else own.examples), None
        found = even_out(self._fleet, self._layout, examples, None if own is None else of_all)
        if found is not None:
            self.swarm.resume(examples, found.latest, found.lost)
        self._others = self.swarm.others_examples
        return found is not None or self._entrance.came_later
