"""The swarm as its trainer sees it: show the model, add what came of exchanges, and come to an end together."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.errors import FleetError
from paceline.events import Gossiped
from paceline.gossip.clerk import Clerk
from paceline.gossip.counts import Counts
from paceline.gossip.layout import Layout
from paceline.gossip.members import State
from paceline.gossip.node import Node

__all__ = ["Swarm"]

REACHED = 60.0  # seconds in which all who begin together must have heard of each other
SETTLED = 30.0  # seconds for an exchange to end before the final model is shown


class Swarm:
    """One worker's part in it; ``deadline`` bounds, in seconds, the waits that there are: at the end, or if asked for.

    With ``strides`` it measures how far the model goes in a step. All methods are for the thread that trains.
    """

    def __init__(self, node: Node, layout: Layout, deadline: float, strides: bool = False) -> None:
        self._node, self._layout, self._deadline = node, layout, deadline
        node.clerk.hurry(deadline)
        self._counted, self._near = Counts(), Counts()
        self._before = torch.zeros(layout.measured) if strides else None
        self.stride = 0.0
        """How far the model went in the last step in which it moved, without what came of exchanges; 0 before."""
        self._spread: float | None = None
        self.examples = 0
        """That this worker has used."""
        self.finished = False
        """Whether its model is the one that all have agreed on."""

    @property
    def others_examples(self) -> int:
        """That the others have used, as far as it was heard."""
        return self._node.sees.others

    @property
    def over(self) -> bool:
        """Whether somebody has come to the end."""
        return self._node.sees.over

    def meet(self) -> None:
        """Hear of all the others, before everybody is on its own: who cannot be reached is an error now."""
        self._node.do(Clerk.meet)
        self._node.wait(
            lambda clerk: not clerk.unmet,
            min(self._deadline, REACHED),
            lambda clerk: (
                f"an answer of {', '.join(f'member {n} at {clerk.members.address(n)}' for n in clerk.unmet)}; "
                "give Gossip(bind=) an address of each machine that the others can reach"
            ),
        )

    @property
    def examples_of_all_lives(self) -> int:
        """That this worker has used, also before it was started again."""
        return self._node.clerk.members.before + self.examples

    @property
    def addresses(self) -> set[str]:
        """Where those listen that take part."""
        members = self._node.clerk.members
        return {members.own.address, *map(members.address, members.others(State.HERE))}

    def begin(self) -> None:
        """The model is one of the swarm; from now on others may average with it."""
        self._show()
        self._node.do(Clerk.begin)

    def join(self) -> None:
        """Take the model of a swarm that trains already from one of its members."""
        joining = self._node.clerk.joining
        assert joining is not None, "it has not begun with the others"
        what = "a member of the swarm to give its model"
        self._node.wait(lambda clerk: joining.model is not None or clerk.over, self._deadline, lambda clerk: what)
        if joining.model is None:
            raise FleetError(
                "the run has come to its end while this worker was away, and there is nothing left to train; the "
                "others have the final model"
            )
        self.take_given()

    def take_given(self) -> None:
        """Go back to the model that a member has given, if one has: a checkpoint's is older than the swarm's."""
        joining = self._node.clerk.joining
        if joining is not None and joining.model is not None:
            self._layout.write(*joining.model)

    def resume(self, examples: int, of_all: int, lost: int) -> None:
        """By its checkpoint this worker has used so many examples, and all together so many; ``lost`` are nobody's."""
        self._node.do(lambda clerk: clerk.members.resume(examples, of_all, lost))
        heard = self._node.mark()
        self._node.wait(
            lambda clerk: heard() and self._node.sees.others + self.examples >= of_all,
            self._deadline,
            lambda clerk: "the thread beside the trainer",
        )

    def catch_up(self) -> None:
        """Add what has come of exchanges so far, before the model is saved."""
        if not self.finished:
            self._correct()
            self._show()

    def step_done(self, examples: int, offers: bool) -> None:
        """So many examples more; ``offers`` says whether it is time to average with somebody."""
        self.examples += examples
        self._layout.check()
        self._measure()
        self._correct()
        self._show()
        total = self.examples
        if offers:
            self._node.do(lambda clerk: clerk.offer(total))
        else:
            self._node.do(lambda clerk: clerk.tell(total), soon=False)

    def stand_still(self) -> None:
        """Until the exchange that was offered is done, or there is nobody to have it with."""
        met = self._node.mark()
        self._node.wait(
            lambda clerk: met() and (clerk.over or (not clerk.wishes and clerk.idle)),
            self._deadline,
            lambda clerk: "a partner to average with",
        )
        self._correct()
        self._show()

    def rest(self) -> None:
        """The loop was left: the model is this worker's own, and the others go on without it."""
        self._node.do(Clerk.rest)

    def finish(self) -> None:
        """The end: the models of all who are alive become one, by the examples that each has used."""
        total = self.examples
        self._node.do(lambda clerk: clerk.tell(total))
        self._node.do(Clerk.end)
        heard = self._node.mark()
        # One that has not ended by then has lost its partner, and moves nobody here.
        self._node.wait_for(lambda clerk: heard() and clerk.idle, min(self._deadline / 2, SETTLED))
        self._correct()
        self._show()
        numbers = torch.empty(self._layout.numel + self._layout.more)
        self._layout.read(numbers)
        self._node.do(lambda clerk: clerk.freeze(numbers))
        self._node.wait(
            lambda clerk: clerk.finale is not None and clerk.finale.finished,
            self._deadline,
            lambda clerk: "the final models" if clerk.finale is None else clerk.finale.waits_for,
        )
        clerk = self._node.clerk
        assert clerk.finale is not None
        assert clerk.finale.agreed is not None
        self._layout.write(*clerk.whole.unpack(clerk.finale.agreed))
        self.finished = True

    def mean(self) -> Tensor:
        """The average of all models as they are now; the others give theirs and go on."""
        clerk = self._node.clerk
        self._show()
        self._node.do(Clerk.gather)
        asked = self._node.mark()
        self._node.wait(
            lambda clerk: asked() and clerk.gathering is not None and clerk.gathering.done,
            self._deadline,
            lambda clerk: f"the models of members {clerk.gathering.missing if clerk.gathering else []}",
        )
        assert clerk.gathering is not None
        self._spread = clerk.gathering.distance()
        return clerk.gathering.mean()

    def event(self, step: int, kernel: str | None = None) -> Gossiped:
        """What was exchanged since the last time; ``kernel`` is what computes the lattice."""
        board, sees = self._node.clerk.board, self._node.sees
        counts = replace(self._node.clerk.counts, age=board.age, taken=board.taken)
        since, self._counted = counts.since(self._counted), counts
        spread, self._spread = self._spread, None
        return since.event(
            step,
            self._node.clerk.members.own.number,
            members=sees.members,
            known=sees.known,
            examples=sees.others + self.examples,
            spread=spread,
            kernel=kernel,
        )

    def distance(self) -> float | None:
        """How far models were from their mean, by the exchanges since it was last asked; None if there were none."""
        counts = replace(self._node.clerk.counts)
        since, self._near = counts.since(self._near), counts
        return since.distance

    def close(self) -> None:
        """Say goodbye."""
        self._node.close()

    def _measure(self) -> None:
        if self._before is not None:
            now = torch.empty(self._layout.numel + self._layout.more)
            self._layout.read(now)
            # Where the optimizer has skipped a step, that says nothing of how far it goes in one.
            self.stride = float((now[: self._layout.measured] - self._before).norm()) or self.stride

    def _correct(self) -> None:
        change = self._node.clerk.board.take()
        if change is not None:
            self._layout.add(change)

    def _show(self) -> None:
        clerk = self._node.clerk
        clerk.counters = self._layout.counters()
        copy = clerk.board.blank()
        self._layout.read(copy)
        if self._before is not None:
            self._before.copy_(copy[: self._layout.measured])
        clerk.board.show(copy)
