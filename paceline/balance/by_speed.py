"""Shares by measured speed: every worker finishes together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from paceline.balance.bounds import Bounds, caps_of
from paceline.balance.burdens import burdens, told
from paceline.balance.solver import Speed, longest_wait, makespan
from paceline.balance.speed import SpeedModel, Typical, typical
from paceline.errors import SettingError
from paceline.given import check_flags, check_whole, is_number, is_whole, list_of
from paceline.records import Note, Round

__all__ = ["BySpeed"]

NOISE = 3.0  # standard errors of a speed that a gain must exceed
PATIENT = 2.0  # times the dead band that one worker may wait
MOST_SAMPLES = 256  # that a look rests on: they are in checkpoints


@dataclass
class BySpeed:
    """Everybody takes what it can finish in the same time as the others, by what was measured so far.

    Args:
        every: steps from one look at the speeds to the next; None for one look after every epoch.
        dead_band: shares change only if the step is predicted to become shorter by more than this part, or the longest
            wait by more than twice this part of the step, and by more than the noise; with 0, for any gain.
        change: the largest factor by which one look changes a share; 1.5 is half more. One example is always allowed.
        least: the smallest share of a worker.
        most: the largest share of each worker, where memory is short; one number for all, or one for each. What a
            worker has found out by running out of memory (``step.attempt``) counts, too.
        multiple: shares are multiples of it, but for one worker's: of the micro-batch, say.
        affine: fit the part of a step that does not depend on the share; otherwise time is taken as proportional to it.
        memory: looks over which a speed is averaged, as long as neither it nor anybody's share jumps by a quarter or
            more; 1 for the last alone.
        leave_out: give nothing to a worker that costs more time than it saves; otherwise that is only recorded. In
            rounds of seconds nobody waits for it, and it goes on with single examples.
    """

    every: int | None = 20
    dead_band: float = 0.02
    change: float = 2.0
    least: int = 1
    most: int | Sequence[int] | None = None
    multiple: int = 1
    affine: bool = True
    memory: int = 5
    leave_out: bool = False

    _models: list[SpeedModel] = field(init=False, repr=False, compare=False, default_factory=list)
    _speeds: list[Speed] = field(init=False, repr=False, compare=False, default_factory=list)
    _samples: list[list[tuple[float, float]]] = field(init=False, repr=False, compare=False, default_factory=list)
    _learnt: list[int] = field(init=False, repr=False, compare=False, default_factory=list)
    _burdens: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())
    _remarks: list[str] = field(init=False, repr=False, compare=False, default_factory=list)
    _told_of_least: bool = field(init=False, repr=False, compare=False, default=False)
    _steps: int = field(init=False, repr=False, compare=False, default=0)
    _batch: int = field(init=False, repr=False, compare=False, default=0)
    _looked: int = field(init=False, repr=False, compare=False, default=0)
    _epoch: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        for name, value, smallest in (
            ("every", 1 if self.every is None else self.every, 1),
            ("multiple", self.multiple, 1),
            ("memory", self.memory, 1),
            ("least", self.least, 0),
        ):
            check_whole(f"BySpeed: {name}", value, smallest)
        check_flags("BySpeed: ", affine=self.affine, leave_out=self.leave_out)
        if not is_number(self.dead_band) or not 0 <= self.dead_band < 1:
            raise SettingError(f"BySpeed: dead_band ({self.dead_band!r}) must be a number of at least 0 and below 1")
        if not is_number(self.change) or not self.change > 1:
            raise SettingError(
                f"BySpeed: change ({self.change!r}) must be a number above 1, or no share could ever change"
            )
        if self.most is None:
            return
        caps = [self.most] if is_whole(self.most) else list_of(is_whole, self.most)
        if caps is None:
            raise SettingError(f"BySpeed: most ({self.most!r}) must be a whole number, or one for each worker")
        if any(cap < max(1, self.least) for cap in caps):
            raise SettingError(f"BySpeed: most ({self.most}) must be at least 1, and not below least ({self.least})")
        self.most = self.most if is_whole(self.most) else caps

    @classmethod
    def per_epoch(cls) -> BySpeed:
        """DBS as published (Ye et al. 2020): shares in proportion to examples over seconds of the epoch before.

        Every step of the epoch counts, and every epoch makes a plan.
        """
        return cls(every=None, dead_band=0.0, change=math.inf, affine=False, memory=1)

    @property
    def speeds(self) -> list[Speed]:
        """What the present shares are made with, one for each worker; empty before the first look that changed them."""
        return list(self._speeds)

    def split(self, batch: int, workers: int) -> list[int]:
        """For any batch: what lets all finish together by the speeds that the last plan was made with."""
        speeds = self._speeds if len(self._speeds) == workers else [Speed(0.0, 1.0)] * workers
        return self._bounds(batch, workers).best(batch, speeds)

    def observe(self, round: Round) -> None:
        """Note the seconds of a round, and look at the speeds if it is time."""
        notes = round.notes
        if len(self._models) != len(notes):
            self._begin(len(notes), round.plan.epoch)
        if self.every is None and round.plan.epoch != self._epoch:
            self._turn(round.plan.epoch)
        # The last step of an epoch is short: whole ones are what shares are for.
        whole = sum(note.examples / note.steps for note in notes if note.steps)
        self._batch = max(self._batch, round.plan.batch, int(whole))
        for samples, note in zip(self._samples, notes, strict=True):
            self._sample(samples, note)
        self._learn_limits([int(note.most) for note in notes])
        self._steps += round.steps
        if self.every is not None and self._steps >= self.every:
            self._look()

    def _begin(self, workers: int, epoch: int) -> None:
        """Nothing is known of these workers; what was known of another number of them says nothing."""
        self._models = [SpeedModel(self.affine, self.memory) for _ in range(workers)]
        self._speeds, self._burdens, self._looked, self._epoch = [], (), 0, epoch
        self._drop_samples()

    def _turn(self, epoch: int) -> None:
        """An epoch is over; or another run has begun, and what was left of the last one is no epoch."""
        if epoch > self._epoch:
            self._look()
        else:
            self._drop_samples()
        self._epoch = epoch

    def _drop_samples(self) -> None:
        self._samples, self._steps, self._batch = [[] for _ in self._models], 0, 0

    def _sample(self, samples: list[tuple[float, float]], note: Note) -> None:
        if not note.steps:
            return
        if note.examples and not note.busy_seconds:
            raise SettingError(
                "BySpeed cannot tell work from waiting where DistributedDataParallel exchanges gradients behind a "
                "communication hook of the user, or on a GPU; give Run the bare module"
            )
        if self.every is None and not self.affine:  # an epoch as a whole
            examples, seconds = samples[0] if samples else (0.0, 0.0)
            samples[:] = [(examples + note.examples, seconds + note.busy_seconds)]
        else:
            samples.append((note.examples / note.steps, note.busy_seconds / note.steps))
            del samples[:-MOST_SAMPLES]

    def remarks(self) -> list[str]:
        """What was noticed since the last time."""
        said, self._remarks = self._remarks, []
        return said

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "models": [model.state_dict() for model in self._models],
            "speeds": [tuple(speed) for speed in self._speeds],
            "samples": self._samples,
            "learnt": self._learnt,
            "burdens": self._burdens,
            "steps": self._steps,
            "batch": self._batch,
            "looked": self._looked,
            "epoch": self._epoch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._models = [SpeedModel(self.affine, self.memory) for _ in state["models"]]
        for model, each in zip(self._models, state["models"], strict=True):
            model.load_state_dict(each)
        self._speeds = [Speed(*speed) for speed in state["speeds"]]
        self._samples = [[(n, t) for n, t in samples] for samples in state["samples"]]
        self._learnt, self._burdens = list(state["learnt"]), tuple(state["burdens"])
        self._steps, self._batch = state["steps"], state["batch"]
        self._looked, self._epoch = state["looked"], state["epoch"]

    def _look(self) -> None:
        found = [typical(samples) for samples in self._samples]
        batch, before, self._looked = self._batch, self._looked, self._batch
        self._drop_samples()
        if 2 * batch < before:  # the end of an epoch; if batches are smaller from now on, the next look will see it
            return
        # What a worker was seen to do while others waited is not what it does beside them, if they share a machine.
        anew = any(model.moved(seen) for model, seen in zip(self._models, found, strict=True))
        for model, seen in zip(self._models, found, strict=True):
            if seen is not None:
                model.add(seen, batch / len(self._models), anew)
        speeds = [model.speed for model in self._models]
        measured = [speed for speed in speeds if speed is not None]
        if not measured:
            return
        # Who has had nothing to do is taken for an average worker until it has.
        mean = Speed(fmean(each.fixed for each in measured), fmean(each.per_example for each in measured))
        known = [mean if speed is None else speed for speed in speeds]
        present = self.split(batch, len(known))
        self._find_burdens(batch, known)
        self._decide(batch, known, present, self._band(found))

    def _decide(self, batch: int, speeds: list[Speed], present: list[int], band: float) -> None:
        """Whether other shares are worth it."""
        bounds, equal = self._bounds(batch, len(speeds)), [Speed(0.0, 1.0)] * len(speeds)
        self._mind_least(batch, bounds.floors(batch))
        wanted = bounds.best(batch, speeds)
        now, then = makespan(speeds, present), makespan(speeds, wanted)
        even = makespan(speeds, bounds.best(batch, equal))
        if not bounds.out and even * (1 - band) <= then and even * (1 - self.dead_band) <= now:
            # So that noise does not lead shares astray where they hardly matter.
            self._move(batch, equal, bounds, present)
            return
        # Whoever is slow adds little to the whole, and may wait long for little.
        relief = longest_wait(speeds, present) - longest_wait(speeds, wanted)
        worthwhile = then < now * (1 - band) or (then < now and relief > PATIENT * band)
        if worthwhile or any(present[rank] for rank in bounds.out):
            self._move(batch, speeds, bounds, present)

    def _band(self, found: Sequence[Typical | None]) -> float:
        """The part of a step that a change must save: what could be noise is no reason to change anything.

        What is known of those that had nothing to do is as old as it is, and decides nothing.
        """
        out = self._out(len(found))
        errors = [
            model.error
            for rank, (model, seen) in enumerate(zip(self._models, found, strict=True))
            if seen is not None and rank not in out
        ]
        noise = NOISE * max(errors, default=0.0) if self.dead_band else 0.0
        return min(max(self.dead_band, noise), 0.9)

    def _move(self, batch: int, speeds: list[Speed], bounds: Bounds, present: list[int]) -> None:
        """Go towards the shares that suit these speeds, as far as one look may; equal speeds are no speeds.

        What cannot be had at once is a plan of its own: shares in this proportion, until the next look.
        """
        reached = bounds.near(batch, speeds, present, self.change)
        if reached == bounds.best(batch, speeds):
            self._speeds = [] if len(set(speeds)) == 1 else speeds
        else:
            self._speeds = [Speed(0.0, 1 / max(share, 0.5)) for share in reached]

    def _bounds(self, batch: int, workers: int) -> Bounds:
        caps = caps_of(batch, workers, self.most, self._learnt, self.multiple)
        return Bounds(self.least, caps, self.multiple, self._out(workers))

    def _out(self, workers: int) -> tuple[int, ...]:
        """Who gets nothing; what was found out about another number of workers says nothing of these."""
        return self._burdens if self.leave_out and len(self._models) == workers else ()

    def _mind_least(self, batch: int, floors: list[int]) -> None:
        if sum(floors) > batch and not self._told_of_least:
            self._told_of_least = True
            what = "shares go without that" if batch < self.least else "the slowest get nothing"
            self._remarks.append(
                f"BySpeed: a batch of {batch} is too small for a share of at least {max(self.least, *floors)} for each "
                f"of {len(floors)} workers; {what}. Lower least, or raise the batch"
            )

    def _find_burdens(self, batch: int, speeds: list[Speed]) -> None:
        """Who costs more than it gives: told when it is found."""
        bounds, before = self._bounds(batch, len(speeds)), self._burdens
        found = burdens(batch, speeds, bounds)
        self._burdens = tuple(sorted(found))
        for rank in sorted(found - set(before)):
            few, idle = max(bounds.floors(batch)[rank], 1), self.leave_out or not self.least
            self._remarks.append(told(rank, speeds[rank], few, idle))

    def _learn_limits(self, limits: list[int]) -> None:
        """Who has run out of memory gets no more than what fitted afterwards."""
        if len(self._learnt) != len(limits):
            self._learnt = [0] * len(limits)
        for rank, limit in enumerate(limits):
            if limit and limit != self._learnt[rank]:
                self._learnt[rank] = limit
                self._remarks.append(
                    f"worker {rank} ran out of memory; its share is at most {limit} from now on, as long as the others "
                    "have room for the rest"
                )
