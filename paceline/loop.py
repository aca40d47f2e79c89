"""The loop of a run: step after step, until the goal is reached, somebody wants to stop, or the user leaves."""

from __future__ import annotations

import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
from torch.utils.hooks import RemovableHandle

from paceline.asking import Asking
from paceline.dealing import Hand, batch_of, collect, deal, draw, whole
from paceline.errors import Interrupted
from paceline.events import Ended, Remark, Started
from paceline.goal import Goal
from paceline.hooks import OptimizerHooks
from paceline.identity import identity, versions
from paceline.journal import Journal
from paceline.lessons import Lessons
from paceline.machinery import Machinery
from paceline.meeting import compare_models, compare_plans, round_of
from paceline.planner import Cursor, advance, cut
from paceline.records import Plan, Progress, Round
from paceline.roles import Counter, Need, Observer, Speaker, Unmet
from paceline.signals import Signals
from paceline.snapshot import writes
from paceline.step import Phase, Step

if TYPE_CHECKING:
    from paceline.run import Run

__all__ = ["Loop"]


class Loop:
    """Makes the steps of a run, and learns from each; there is one, which the run begins as often as it is asked to."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.cursor = Cursor(Progress(), (0,) * len(run.lengths))
        self._after = self.cursor
        self._last: Plan | None = None
        self.current: Step | None = None
        """The step that the user's loop is in."""
        self.stop_wanted = False
        self._signals = Signals()
        self._goal = Goal(steps=1)
        self._done: Goal | None = None
        self.hand: Hand | None = None
        """What was dealt, in a round in which every worker goes at its own pace."""
        self._drawn = 0
        self._left = False
        self._handles: list[RemovableHandle] = []
        self._stopping = 0
        self._warned = False
        roles = {id(role): role for role in run.roles().values()}.values()  # one object may have two roles
        self._observers = [role for role in roles if isinstance(role, Observer)]
        self._batch_norm = run.replica.batch_norm if run.fleet.size > 1 else ""
        self._speakers = [role for role in roles if isinstance(role, Speaker)]
        self._counter = run.lr if isinstance(run.lr, Counter) else None
        self._unmet = run.sync if isinstance(run.sync, Unmet) else None
        self.lessons = Lessons(run.order, run.fleet, alone=self._unmet is not None)
        self._asking = Asking(roles)

    def equip(self, parts: Machinery, journal: Journal) -> None:
        """Take the parts that a step works with."""
        self._parts, self._journal = parts, journal
        self.hooks = OptimizerHooks(self._run, self)

    @property
    def progress(self) -> Progress:
        """How far all workers are; where they never meet, as far as this one knows."""
        own = self.cursor.progress
        return own if self._unmet is None else self._unmet.progress(own, sum(self._run.lengths))

    def steps(self, goal: Goal) -> Generator[Step]:
        """Train until the goal is reached."""
        run = self._run
        self._goal = goal
        numbers = sum(p.numel() for p in run.replica.parameters)
        facts = (run.fleet.size, numbers, sum(run.lengths), identity(run), versions(), goal.as_progress())
        self._journal.write(Started(time.time(), *facts))
        if self._unmet is not None:
            self._unmet.begin(self.cursor.progress)
        self._parts.clock.free()
        reason = "left"
        try:
            with self._signals:
                while not goal.reached(self.progress) and not self._stopping:
                    self._journal.begin_step()
                    self.current = self._next_step(goal)
                    yield self.current
                    self.close_step(self.current)
            reason = "stopped" if self._stopping and not goal.reached(self.progress) else "done"
            self._done = None if self._stopping else goal  # who goes on after somebody has left asks for the same again
            if signal := self._end_together():
                reason = f"signal {signal}"
                raise Interrupted(signal)
        except GeneratorExit:
            self._leave()
            reason = self._parts.failure or reason
            raise
        except BaseException as error:
            reason = reason if isinstance(error, Interrupted) else type(error).__name__
            raise
        finally:
            self.current, self.stop_wanted = None, False
            if not self._left:
                self.hand, self._stopping = None, 0
            progress = self.progress
            self._journal.write(Ended(time.time(), progress.step, progress.examples, reason))

    def mind_totals(self, goal: Goal) -> None:
        """Warn who asks for one epoch in every turn of a loop of their own: goals count from the run's beginning."""
        if goal == self._done and goal.reached(self.progress):
            warnings.warn(
                f"run.steps({goal}) has nothing to do: it was asked for before, and done; it counts from the beginning "
                "of the run. For one epoch more in every turn of a loop of your own, write epochs=epoch + 1",
                stacklevel=3,
            )

    def plan(self, cursor: Cursor, goal: Goal | None) -> Plan:
        """What all workers do in the step that begins here."""
        run = self._run
        size = run.batch.size(cursor.progress)
        # Where workers never meet, how much of a budget is left is not known to the example.
        left = goal.left(cursor.progress) if goal and self._unmet is None else None
        return self.lessons.mark(cut(cursor, run.lengths, run.fleet.size, size, run.balance.split, run.micro, left))

    def _draw(self, hand: Hand, step: int) -> Plan:
        return self.lessons.mark(draw(hand, step))

    def _next_step(self, goal: Goal) -> Step:
        if self._apart():
            hand = self._deal(goal)
            future = partial(self._foresee_draws, hand, self._drawn + 1)
            return Step(self._parts, self._draw(hand, self._drawn), False, future)
        plan = self.plan(self.cursor, goal)
        self._mind_batch_norm(plan.counts)
        self._after = after = advance(self.cursor, plan, self._run.lengths)
        return Step(self._parts, plan, after.progress.epoch > plan.epoch, partial(self._foresee, after, goal))

    def _mind_batch_norm(self, counts: Sequence[int]) -> None:
        if not self._batch_norm or max(counts) - min(counts) <= 1:
            return
        layer, self._batch_norm = self._batch_norm, ""
        if self._run.fleet.rank == 0:
            warnings.warn(
                f"{layer} takes its statistics over each worker's own examples, which are {list(counts)} now: the "
                "result depends on who takes how many. GroupNorm or LayerNorm does not",
                stacklevel=4,
            )

    def _apart(self) -> bool:
        """Whether workers go at their own pace now: decided when a round begins."""
        return self.hand is not None or self._run.sync.apart(self.cursor.progress)

    def _deal(self, goal: Goal) -> Hand:
        if self.hand is None:
            run, progress = self._run, self.cursor.progress
            size, left = run.batch.size(progress), goal.left(progress)
            self.hand = deal(self.cursor, run.lengths, run.fleet.size, size, run.balance.split, run.micro, left)
            self._drawn = 0
            self._mind_batch_norm(self.hand.sizes)
        return self.hand

    def wishes(self) -> tuple[float, float]:
        """What this worker wants of all: the number of a signal or 1 to stop, 1 to save (who writes decides that)."""
        run = self._run
        stop = float(self._signals.got or self.stop_wanted)
        decides = run.checkpoint if writes(run) else None
        return stop, float(decides is not None and decides.due(self.cursor.progress.step + 1, time.monotonic()))

    def looks(self, plan: Plan) -> frozenset[Need] | None:
        """What the probe has to look at in a step; None for nothing."""
        run = self._run
        needs = self._asking.needs(self.cursor.progress, plan, self._parts.probe, run.sync)
        if needs:
            self._parts.probe.follow(run.replica.parameters)
        return needs or None

    def batch_of(self, step: Step) -> int:
        """The examples of all workers that a step stands for, whatever each does meanwhile."""
        return step.plan.batch if self.hand is None else batch_of(self.hand, step.plan, self._run.fleet.rank)

    def close_step(self, step: Step) -> None:
        """The body of the loop is done: learn from the step, and move on."""
        if step.phase is Phase.CLOSED:
            return
        if step.phase in (Phase.NEW, Phase.OPEN):
            raise step.left_early()
        self.hooks.settle()
        if step.phase is Phase.READY and self._run.scaler is None and not self._warned:
            self._warned = True
            warnings.warn(
                f"optimizer.step() was not called in step {step.index}, that of the optimizer that was given to Run: "
                "nothing was learnt",
                stacklevel=3,
            )
        self.advance(step)
        applied, step.phase = step.phase is Phase.APPLIED, Phase.CLOSED
        self._parts.skipped = not applied
        if step.round:
            self._learn(step.round, applied)

    def advance(self, step: Step) -> None:
        """The step counts: as soon as the optimizer has stepped, so that the rest of the loop's body sees it."""
        if self.cursor.progress.step != step.index:
            return
        self._parts.skipped = step.phase is not Phase.APPLIED  # it may be left before it is closed
        self.lessons.see(step.fragments)
        self._last = step.plan
        if self.hand is not None:
            self._advance_apart(step, self.hand)
            return
        self.cursor = self._after
        if self._unmet is not None:  # its epochs end between meetings, too
            self.lessons.learn(self.cursor.progress, self._parts)
        # Where workers train apart, one may have skipped a step that others have done: it counts on all of them.
        if self._counter is not None and (step.phase is Phase.APPLIED or step.round is None):
            self._counter.stepped(step.plan.batch, 1)
        step.end(self.cursor.progress, self._goal.reached(self.progress))

    def _advance_apart(self, step: Step, hand: Hand) -> None:
        """Between two meetings only the own steps are known; at the meeting, everybody's."""
        self._drawn += 1
        now = msgspec.structs.replace(hand.begin.progress, step=step.index + 1)
        self.cursor = msgspec.structs.replace(self.cursor, progress=now)
        empty = draw(hand, self._drawn).counts[self._run.fleet.rank] == 0
        step.end(now, empty or self._goal.reached(now))
        if step.round is not None:
            step.round = self._meet(step.round)
            step.ends_epoch = self.cursor.progress.epoch > step.epoch

    def _meet(self, round: Round) -> Round:
        """The round is over: what was not drawn goes back. Its plan is that of the worker that did most steps."""
        hand, self.hand = self.hand, None
        if hand is None:
            return round
        self.cursor = collect(hand, [int(note.steps) for note in round.notes], self._run.lengths)
        if self._counter is not None:  # whoever did most: between meetings workers do not know of each other's steps
            self._counter.stepped(sum(hand.sizes), round.steps)
        notes, policy = round.notes, self._run.checkpoint
        # Rank 0 has asked for a checkpoint at its own steps, and others may have come further.
        every = policy.every if policy else None
        if every and self.cursor.progress.step // every > hand.begin.progress.step // every:
            notes = (msgspec.structs.replace(notes[0], save=1.0), *notes[1:])
        return msgspec.structs.replace(round, plan=whole(hand, max(round.steps - 1, 0)), notes=notes)

    def _learn(self, round: Round, applied: bool) -> None:
        for observer in self._observers:
            observer.observe(round)
        for speaker in self._speakers:
            for text in speaker.remarks():
                self._journal.write(Remark(time.time(), round.plan.step, text))
        self._stopping = int(max(note.stop for note in round.notes))
        run = self._run
        self.lessons.learn(self.cursor.progress, self._parts)
        self._tell_exchanges()
        clock, rate = self._parts.clock, self._run.replica.learning_rate
        self._journal.round_done(round, self.progress, clock, run.sync, rate, applied)
        if round.notes[0].save:
            run.save_by_itself()

    def _tell_exchanges(self) -> None:
        for event in self._unmet.events(max(self.cursor.progress.step - 1, 0)) if self._unmet is not None else []:
            self._journal.write(event)

    def _end_together(self) -> int:
        """What came after the last note is known to one worker only: ask all. Gives the number of a signal, or 0."""
        if self._unmet is not None:
            if self._signals.got:
                self._run.save_by_itself()
            else:
                self._unmet.finish()
                self._tell_exchanges()
            return self._signals.got
        own = f"{self._signals.got} {int(self._parts.skipped)}".encode()
        told = [blob.split() for blob in self._run.fleet.gather(own, "the others to end the loop")]
        if not self._run.sync.waits_for_leavers:  # else each has a model of its own in between
            compare_models([int(skipped) for _, skipped in told], self.cursor.progress.step - 1)
        if signal := max(int(got) for got, _ in told):
            self._run.save_by_itself()
        return signal

    def _leave(self) -> None:
        """The loop was left early on this worker: the others are told, or met once more at the end of the round.

        Whether by ``break`` or by an error cannot be seen from here. So who can be met is met when it matters: before
        anything that uses the model or the run (:meth:`settle`); if an error follows instead, the others get it.
        """
        run = self._run
        if self.current and self.current.phase is Phase.APPLIED:
            self.close_step(self.current)
        self.current = None
        # Who works alone may survive an error, and begin another loop: what it has used of its hand must count then.
        alone = self.hand is not None and run.fleet.size == 1
        if (self._parts.failure and not alone) or run.fleet.closed:
            return
        if not run.sync.waits_for_leavers:
            if not self._goal.reached(self.progress) and not self._stopping:
                if self._unmet is not None:
                    self._unmet.rest()
                run.fleet.leave("left the training loop")
            else:
                self._end_together()
            return
        module = run.replica.module
        self._left = True
        self._handles = [
            module.register_forward_pre_hook(lambda *_: self.settle()),
            module.register_state_dict_pre_hook(lambda *_: self.settle()),  # type: ignore[no-untyped-call]
        ]

    def abandon(self) -> None:
        """An error is why the loop was left: there is nobody to be met."""
        self._left, self.hand, self._stopping = False, None, 0
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def settle(self) -> None:
        """If the loop was left: take part in what the others do until they end it, too."""
        if not self._left:
            return
        goal, hand, stopping = self._goal, self.hand, self._stopping
        self.abandon()
        self.hand, self._stopping = hand, stopping
        try:
            self._meet_the_others(goal)
        finally:
            self.abandon()

    def _meet_the_others(self, goal: Goal) -> None:
        run = self._run
        if not goal.reached(self.cursor.progress) and not self._stopping:
            apart = self._apart()
            plan = self._draw(self._deal(goal), self._drawn) if apart else self.plan(self.cursor, goal)
            meeting = run.sync.leave(plan)
            compare_plans(meeting.notes, plan.step)
            behind = round(max(note.steps for note in meeting.notes) - meeting.notes[run.fleet.rank].steps)
            if not apart:  # what the others have done is done; who is the furthest has done the last of it
                plan = self._last or plan
                for plan in islice(self._foresee(self.cursor, goal), behind):
                    self.cursor = advance(self.cursor, plan, run.lengths)
                    if self._counter is not None:
                        self._counter.stepped(plan.batch, 1)
            self._learn(self._meet(round_of(plan, meeting)), applied=False)
        self._end_together()

    def _foresee(self, cursor: Cursor, goal: Goal) -> Iterator[Plan]:
        """The plans that follow if no role changes its mind."""
        while self._unmet is not None or not goal.reached(cursor.progress):
            plan = self.plan(cursor, goal)
            yield plan
            cursor = advance(cursor, plan, self._run.lengths)

    def _foresee_draws(self, hand: Hand, step: int) -> Iterator[Plan]:
        """The plans that follow if the round goes on."""
        while (plan := self._draw(hand, step)).counts[self._run.fleet.rank]:
            yield plan
            step += 1
