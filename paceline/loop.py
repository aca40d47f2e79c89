"""The loop of a run: step after step, until the goal is reached, somebody wants to stop, or the user leaves."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from paceline.errors import Interrupted
from paceline.goal import Goal
from paceline.hooks import OptimizerHooks
from paceline.identity import identity, versions
from paceline.journal import Journal
from paceline.planner import Cursor, advance, cut
from paceline.records import Ended, Plan, Progress, Round, Started
from paceline.roles import Observer
from paceline.signals import Signals
from paceline.step import Machinery, Phase, Step

if TYPE_CHECKING:
    from paceline.run import Run

__all__ = ["Loop"]


class Loop:
    """Makes the steps of a run, and learns from each; there is one, which the run begins as often as it is asked to."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.cursor = Cursor(Progress(), (0,) * len(run.lengths))
        self.current: Step | None = None
        """The step that the user's loop is in."""
        self.stop_wanted = False
        self._signals = Signals()
        self._goal = Goal(steps=1)
        self._stopping = 0
        self._warned = False
        self._observers = [role for role in run.roles().values() if isinstance(role, Observer)]

    def equip(self, parts: Machinery, journal: Journal) -> None:
        """Take the parts that a step works with."""
        self._parts, self._journal = parts, journal
        self.hooks = OptimizerHooks(self._run, self)

    def steps(self, goal: Goal) -> Iterator[Step]:
        """Train until the goal is reached."""
        run = self._run
        self._goal = goal
        numbers = sum(p.numel() for p in run.replica.parameters)
        facts = (run.fleet.size, numbers, sum(run.lengths), identity(run), versions(), goal.as_progress())
        self._journal.write(Started(time.time(), *facts))
        self._parts.clock.free()
        reason = "left"
        try:
            with self._signals:
                while not goal.reached(self.cursor.progress) and not self._stopping:
                    self._journal.begin_step()
                    plan = self.plan(self.cursor, goal)
                    after = advance(self.cursor, plan, run.lengths)
                    future = partial(self._foresee, after, goal)
                    self.current = Step(self._parts, plan, after.progress.epoch > plan.epoch, future)
                    yield self.current
                    self.close_step(self.current)
            reason = "stopped" if self._stopping else "done"
            if signal := self._end_together():
                reason = f"signal {signal}"
                raise Interrupted(signal)
        except GeneratorExit:
            self._leave(goal)
            reason = self._parts.failure or reason
            raise
        except BaseException as error:
            reason = reason if isinstance(error, Interrupted) else type(error).__name__
            raise
        finally:
            self.current, self._stopping, self.stop_wanted = None, 0, False
            progress = self.cursor.progress
            self._journal.write(Ended(time.time(), progress.step, progress.examples, reason))

    def plan(self, cursor: Cursor, goal: Goal | None) -> Plan:
        """What all workers do in the step that begins here."""
        run = self._run
        size = run.batch.size(cursor.progress)
        left = goal.left(cursor.progress) if goal else None
        return cut(cursor, run.lengths, run.fleet.size, size, run.balance.split, run.micro, left)

    def wishes(self) -> tuple[float, float]:
        """What this worker wants of all: the number of a signal or 1 to stop, 1 to save (rank 0 decides that)."""
        run = self._run
        stop = float(self._signals.got or self.stop_wanted)
        decides = run.checkpoint if run.fleet.rank == 0 else None
        return stop, float(decides is not None and decides.due(self.cursor.progress.step + 1, time.monotonic()))

    def close_step(self, step: Step) -> None:
        """The body of the loop is done: learn from the step, and move on."""
        if step.phase is Phase.CLOSED:
            return
        if step.phase in (Phase.NEW, Phase.OPEN):
            raise step.left_early()
        if step.phase is Phase.READY and self._run.scaler is None and not self._warned:
            self._warned = True
            warnings.warn(f"optimizer.step() was not called in step {step.index}: nothing was learnt", stacklevel=3)
        self.advance(step)
        applied, step.phase = step.phase is Phase.APPLIED, Phase.CLOSED
        if step.round:
            self._learn(step.round, applied)

    def advance(self, step: Step) -> None:
        """The step counts: as soon as the optimizer has stepped, so that the rest of the loop's body sees it."""
        if self.cursor.progress.step == step.index:
            self.cursor = advance(self.cursor, step.plan, self._run.lengths)
            step.end(self.cursor.progress, self._goal.reached(self.cursor.progress))

    def _learn(self, round: Round, applied: bool) -> None:
        for observer in self._observers:
            observer.observe(round)
        self._stopping = int(max(note.stop for note in round.notes))
        run = self._run
        clock, rate = self._parts.clock, self.hooks.learning_rate
        self._journal.round_done(round, self.cursor.progress, clock, run.sync, rate, applied)
        if round.notes[0].save:
            run.save_by_itself()

    def _end_together(self) -> int:
        """A signal that came after the last note is known to one worker only: ask all. Gives its number, or 0."""
        got = self._run.fleet.gather(str(self._signals.got).encode(), "the others to end the loop")
        if signal := max(map(int, got)):
            self._run.save_by_itself()
        return signal

    def _leave(self, goal: Goal) -> None:
        """The loop was left early on this worker: the others are told, or met once more at the end of the round."""
        run = self._run
        if self.current and self.current.phase is Phase.APPLIED:
            self.close_step(self.current)
        self.current = None
        if self._parts.failure or run.fleet.closed:
            return
        if not goal.reached(self.cursor.progress) and not self._stopping:
            plan = self.plan(self.cursor, goal)
            notes = run.sync.leave(plan)
            if notes is None:
                run.fleet.leave("left the training loop")
                return
            behind = round(max(note.steps for note in notes) - notes[run.fleet.rank].steps)
            for plan in islice(self._foresee(self.cursor, goal), behind):  # what the others have done is done
                self.cursor = advance(self.cursor, plan, run.lengths)
            self._learn(Round(plan=plan, notes=notes, steps=behind), applied=False)
        self._end_together()

    def _foresee(self, cursor: Cursor, goal: Goal) -> Iterator[Plan]:
        """The plans that follow if no role changes its mind."""
        while not goal.reached(cursor.progress):
            plan = self.plan(cursor, goal)
            yield plan
            cursor = advance(cursor, plan, self._run.lengths)
