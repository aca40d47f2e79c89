"""Rounds in which every worker goes at its own pace: who may draw which examples. Pure functions.

How many steps a worker will do in such a round is known when the round is over. So each is dealt more than it will
need; what it has not drawn goes back, and is dealt again. Every example of an epoch is still drawn exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from paceline.balance.rounding import largest_remainder
from paceline.planner import Cursor, Split, after, checked_shares, remaining, take_local
from paceline.ranges import drop, part, simplified
from paceline.records import Plan

__all__ = ["Hand", "batch_of", "collect", "deal", "draw", "whole"]

SPARE = 2  # a worker may be so many times as fast as in the last round before it has to wait
FEWEST_STEPS = 4


class Hand(msgspec.Struct, frozen=True):
    """What was dealt for one round."""

    begin: Cursor
    sizes: tuple[int, ...]
    """For each worker, the examples of one of its steps."""
    stripes: tuple[int, ...]
    """For each worker, the examples that it may draw."""
    micro: int
    local: bool
    """Whether workers have data of their own."""

    def drawn(self, steps: Sequence[int]) -> tuple[int, ...]:
        """For each worker, the examples that it has drawn after so many steps of its own."""
        return tuple(min(s * size, most) for s, size, most in zip(steps, self.sizes, self.stripes, strict=True))


def deal(
    cursor: Cursor,
    lengths: tuple[int, ...],
    workers: int,
    batch: int,
    split: Split,
    micro: int | None,
    left: int | None,
) -> Hand:
    """Deal for the round that begins here; the arguments are those of :func:`paceline.planner.cut`.

    A worker gets a few times what it drew in the last round. If there is not so much left, or no last round, all that
    is left is dealt in proportion to what was drawn, so that all come to the end of it together.
    """
    sizes = tuple(max(size, 1) for size in checked_shares(batch, min(batch, sum(lengths)), workers, split))
    rest = remaining(cursor, lengths)
    there = sum(rest) if left is None else min(sum(rest), left)
    pace = cursor.pace if len(cursor.pace) == workers else sizes
    stripes = [max(SPARE * drew, FEWEST_STEPS * size) for drew, size in zip(pace, sizes, strict=True)]
    if pace is not cursor.pace or sum(stripes) > there:
        stripes = largest_remainder(there, [max(drew, size) for drew, size in zip(pace, sizes, strict=True)])
    local = len(lengths) > 1
    if local:
        stripes = list(take_local(largest_remainder(there, rest), rest)) if left is not None else list(rest)
    return Hand(cursor, sizes, tuple(stripes), micro or max(sizes), local)


def draw(hand: Hand, step: int) -> Plan:
    """The plan of everybody's step number ``step`` in the round, from 0, if nobody stops before."""
    before = hand.drawn([step] * len(hand.sizes))
    after = hand.drawn([step + 1] * len(hand.sizes))
    begin = hand.begin
    first = begin.taken if hand.local else tuple(accumulate(hand.stripes[:-1], initial=_offset(begin)))
    return Plan(
        step=begin.progress.step + step,
        epoch=begin.progress.epoch,
        starts=tuple(one + more for one, more in zip(first, before, strict=True)),
        counts=tuple(stop - start for start, stop in zip(before, after, strict=True)),
        micro=hand.micro,
        ranges=begin.ranges,
    )


def batch_of(hand: Hand, plan: Plan, rank: int) -> int:
    """The batch that a worker's step is a part of: with all others, also with those who have nothing left to draw.

    They go on as soon as they are dealt more. A step of fewer examples than the worker's others is part of a batch that
    is smaller by as much.
    """
    return max(1, -(-sum(hand.sizes) * plan.counts[rank] // hand.sizes[rank]))


def whole(hand: Hand, step: int) -> Plan:
    """The plan of a step as it is told when the round is over: of all workers, unless there was not so much left."""
    counts = hand.sizes if sum(hand.stripes) >= sum(hand.sizes) else hand.stripes
    return msgspec.structs.replace(draw(hand, step), counts=counts)


def collect(hand: Hand, steps: Sequence[int], lengths: tuple[int, ...]) -> Cursor:
    """Where the run stands after the round, in which the workers did so many steps each."""
    drawn, begin = hand.drawn(steps), hand.begin
    taken = tuple(one + more for one, more in zip(begin.taken, drawn if hand.local else (sum(drawn),), strict=True))
    ranges: list[tuple[int, int]] = []
    if not hand.local:
        pool = begin.ranges or ((begin.taken[0], lengths[0]),)
        ends = list(accumulate(hand.stripes))
        for end, stripe, used in zip(ends, hand.stripes, drawn, strict=True):
            ranges += part(pool, end - stripe + used, end)
        ranges += drop(pool, ends[-1])
    return after(begin, max(steps), sum(drawn), taken, simplified(ranges, lengths[-1]), lengths, drawn)


def _offset(begin: Cursor) -> int:
    """Positions count from the beginning of the epoch, or of the ranges that are left of it."""
    return 0 if begin.ranges else begin.taken[0]
