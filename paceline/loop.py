"""The loop of a run: step after step, until the goal is reached, somebody wants to stop, or the user leaves."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from paceline.absence import Absence
from paceline.asking import Asking
from paceline.cautions import Cautions
from paceline.errors import Interrupted
from paceline.events import Ended, Remark, Started
from paceline.goal import Goal
from paceline.hooks import OptimizerHooks
from paceline.identity import identity, versions
from paceline.journal import Journal
from paceline.lessons import Lessons
from paceline.machinery import Machinery
from paceline.meeting import compare_models, compare_plans, round_of
from paceline.own_pace import OwnPace
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
        self.absence = Absence(run, self)
        self._stopping = 0
        roles = {id(role): role for role in run.roles().values()}.values()  # one object may have two roles
        self._observers = [role for role in roles if isinstance(role, Observer)]
        self.cautions = Cautions(run.fleet.rank, run.replica.batch_norm if run.fleet.size > 1 else "")
        self._speakers = [role for role in roles if isinstance(role, Speaker)]
        self._counter = run.lr if isinstance(run.lr, Counter) else None
        self._unmet = run.sync if isinstance(run.sync, Unmet) else None
        self.lessons = Lessons(run.order, run.fleet, alone=self._unmet is not None)
        self.pace = OwnPace(run, self.lessons)
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
            # Who goes on after somebody has left asks for the same again.
            self.cautions.done = None if self._stopping else goal
            if signal := self._end_together():
                reason = f"signal {signal}"
                raise Interrupted(signal)
        except GeneratorExit:
            self.absence.begin(self._parts)
            reason = self._parts.failure or reason
            raise
        except BaseException as error:
            reason = reason if isinstance(error, Interrupted) else type(error).__name__
            raise
        finally:
            self.current, self.stop_wanted = None, False
            if not self.absence.lasts:
                self.forget_round()
            progress = self.progress
            self._journal.write(Ended(time.time(), progress.step, progress.examples, reason))

    def forget_round(self) -> None:
        """The round that the loop was in is over, or of no use."""
        self.pace.forget()
        self._stopping = 0

    def plan(self, cursor: Cursor, goal: Goal | None) -> Plan:
        """What all workers do in the step that begins here."""
        run = self._run
        size = run.batch.size(cursor.progress)
        # Where workers never meet, how much of a budget is left is not known to the example.
        left = goal.left(cursor.progress) if goal and self._unmet is None else None
        return self.lessons.mark(cut(cursor, run.lengths, run.fleet.size, size, run.balance.split, run.micro, left))

    def _next_step(self, goal: Goal) -> Step:
        if self._apart():
            self._deal(goal)
            return Step(self._parts, self.pace.plan(), False, self.pace.future())
        plan = self.plan(self.cursor, goal)
        self.cautions.mind_shares(plan.counts)
        self._after = after = advance(self.cursor, plan, self._run.lengths)
        return Step(self._parts, plan, after.progress.epoch > plan.epoch, partial(self._foresee, after, goal))

    def _apart(self) -> bool:
        """Whether workers go at their own pace now: decided when a round begins."""
        return self.pace.hand is not None or self._run.sync.apart(self.cursor.progress)

    def _deal(self, goal: Goal) -> None:
        if self.pace.hand is None:
            self.cautions.mind_shares(self.pace.begin(self.cursor, goal).sizes)

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
        return step.plan.batch if self.pace.hand is None else self.pace.batch_of(step.plan)

    def close_step(self, step: Step) -> None:
        """The body of the loop is done: learn from the step, and move on."""
        if step.phase is Phase.CLOSED:
            return
        if step.phase in (Phase.NEW, Phase.OPEN):
            raise step.left_early()
        self.hooks.settle()
        if step.phase is Phase.READY and self._run.scaler is None:
            self.cautions.mind_idleness(step.index)
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
        if self.pace.hand is not None:
            self._advance_apart(step)
            return
        self.cursor = self._after
        if self._unmet is not None:  # its epochs end between meetings, too
            self.lessons.learn(self.cursor.progress, self._parts)
        # Where workers train apart, one may have skipped a step that others have done: it counts on all of them.
        if self._counter is not None and (step.phase is Phase.APPLIED or step.round is None):
            self._counter.stepped(step.plan.batch, 1)
        step.end(self.cursor.progress, self._goal.reached(self.progress))

    def _advance_apart(self, step: Step) -> None:
        now, empty = self.pace.stepped(step.index)
        self.cursor = msgspec.structs.replace(self.cursor, progress=now)
        step.end(now, empty or self._goal.reached(now))
        if step.round is not None:
            step.round = self._meet(step.round)
            step.ends_epoch = self.cursor.progress.epoch > step.epoch

    def _meet(self, round: Round) -> Round:
        """All have come to the end of the round; if each went at its own pace, only now is known how far they are."""
        hand = self.pace.hand
        if hand is None:
            return round
        self.cursor, round = self.pace.meet(round)
        if self._counter is not None:  # whoever did most: between meetings workers do not know of each other's steps
            self._counter.stepped(sum(hand.sizes), round.steps)
        return round

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

    def tell_of_leaving(self) -> None:
        """Where nobody waits for who leaves: say so to the others, or end the loop with them if it has come to that."""
        if self._unfinished:
            if self._unmet is not None:
                self._unmet.rest()
            self._run.fleet.leave("left the training loop")
        else:
            self._end_together()

    def meet_the_others(self) -> None:
        """Where they wait for who leaves: take part in the rest of the round, after which all end the loop."""
        if self._unfinished:
            apart, run = self._apart(), self._run
            if apart:
                self._deal(self._goal)
            plan = self.pace.plan() if apart else self.plan(self.cursor, self._goal)
            meeting = run.sync.leave(plan)
            compare_plans(meeting.notes, plan.step)
            behind = round(max(note.steps for note in meeting.notes) - meeting.notes[run.fleet.rank].steps)
            if not apart:  # what the others have done is done; who is the furthest has done the last of it
                plan = self._last or plan
                for plan in islice(self._foresee(self.cursor, self._goal), behind):
                    self.cursor = advance(self.cursor, plan, run.lengths)
                    if self._counter is not None:
                        self._counter.stepped(plan.batch, 1)
            self._learn(self._meet(round_of(plan, meeting)), applied=False)
        self._end_together()

    @property
    def _unfinished(self) -> bool:
        """Whether the loop would go on, had it not been left."""
        return not self._goal.reached(self.progress) and not self._stopping

    def _foresee(self, cursor: Cursor, goal: Goal) -> Iterator[Plan]:
        """The plans that follow if no role changes its mind."""
        while self._unmet is not None or not goal.reached(cursor.progress):
            plan = self.plan(cursor, goal)
            yield plan
            cursor = advance(cursor, plan, self._run.lengths)
