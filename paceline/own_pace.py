"""Rounds in which every worker goes at its own pace: what this worker does in one, and where it has led when all meet.

Who may draw which examples is in :mod:`paceline.dealing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from paceline.dealing import Hand, batch_of, collect, deal, draw, whole
from paceline.goal import Goal
from paceline.lessons import Lessons
from paceline.planner import Cursor
from paceline.records import Plan, Progress, Round

if TYPE_CHECKING:
    from paceline.run import Run

__all__ = ["OwnPace"]


class OwnPace:
    """The hand of this worker, from when a round begins until all meet."""

    def __init__(self, run: Run, lessons: Lessons) -> None:
        self._run, self._lessons = run, lessons
        self.hand: Hand | None = None
        """What was dealt for the round; None while all go step by step together."""
        self._drawn = 0

    @property
    def _held(self) -> Hand:
        assert self.hand is not None, "no such round has begun"
        return self.hand

    def begin(self, cursor: Cursor, goal: Goal) -> Hand:
        """A round begins: deal."""
        run = self._run
        size, left = run.batch.size(cursor.progress), goal.left(cursor.progress)
        self.hand = deal(cursor, run.lengths, run.fleet.size, size, run.balance.split, run.micro, left)
        self._drawn = 0
        return self.hand

    def forget(self) -> None:
        """The round is over."""
        self.hand = None

    def plan(self) -> Plan:
        """That of this worker's next step."""
        return self._draw(self._held, self._drawn)

    def future(self) -> Callable[[], Iterator[Plan]]:
        """The plans that follow it if the round goes on."""
        return partial(self._foresee, self._held, self._drawn + 1)

    def batch_of(self, plan: Plan) -> int:
        """The examples of all workers that a step of this one stands for."""
        return batch_of(self._held, plan, self._run.fleet.rank)

    def stepped(self, index: int) -> tuple[Progress, bool]:
        """This worker has done its step of that index: how far it is, and whether it has nothing left to draw.

        Between two meetings only the own steps are known; at the meeting, everybody's.
        """
        hand = self._held
        self._drawn += 1
        now = msgspec.structs.replace(hand.begin.progress, step=index + 1)
        return now, draw(hand, self._drawn).counts[self._run.fleet.rank] == 0

    def meet(self, round: Round) -> tuple[Cursor, Round]:
        """The round is over: what was not drawn goes back. Its plan is that of the worker that did most steps."""
        hand, policy = self._held, self._run.checkpoint
        self.forget()
        cursor, notes = collect(hand, [int(note.steps) for note in round.notes], self._run.lengths), round.notes
        # Rank 0 has asked for a checkpoint at its own steps, and others may have come further.
        every = policy.every if policy else None
        if every and cursor.progress.step // every > hand.begin.progress.step // every:
            notes = (msgspec.structs.replace(notes[0], save=1.0), *notes[1:])
        return cursor, msgspec.structs.replace(round, plan=whole(hand, max(round.steps - 1, 0)), notes=notes)

    def _draw(self, hand: Hand, step: int) -> Plan:
        return self._lessons.mark(draw(hand, step))

    def _foresee(self, hand: Hand, step: int) -> Iterator[Plan]:
        while (plan := self._draw(hand, step)).counts[self._run.fleet.rank]:
            yield plan
            step += 1
