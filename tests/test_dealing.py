"""Rounds in which workers do as many steps as they like: every example of an epoch is drawn exactly once."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.balance import BySpeed, Even
from paceline.dealing import Hand, collect, deal, draw
from paceline.plain import plain_tree
from paceline.planner import Cursor, Split, advance, cut, remaining
from paceline.records import Plan, Progress

EVEN = Even().split


def weighted(weights: Sequence[int]) -> Split:
    def split(batch: int, workers: int) -> list[int]:
        shares = [batch * weight // (sum(weights) or 1) for weight in weights]
        shares[0] += batch - sum(shares)
        return shares

    return split


def as_saved(cursor: Cursor) -> Cursor:
    """As a checkpoint writes and reads it, without the file."""
    return msgspec.convert(plain_tree(msgspec.to_builtins(cursor)), Cursor)


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    workers = draw(st.integers(1, 5))
    local = workers > 1 and draw(st.booleans())
    sizes = st.integers(1, 60)
    return {
        "workers": workers,
        "lengths": tuple(draw(st.lists(sizes, min_size=workers, max_size=workers)))
        if local
        else (draw(st.integers(1, 300)),),
        "batches": draw(st.lists(st.integers(workers, 20), min_size=1, max_size=3)),
        "weights": draw(st.lists(st.integers(0, 9), min_size=workers, max_size=workers)),
        "micro": draw(st.none() | st.integers(1, 7)),
        "budget": draw(st.none() | st.integers(1, 90)),
        "together": draw(st.sampled_from([0.0, 0.3])),
        "leave": draw(st.sampled_from([0.0, 0.1])),
    }


class Epochs:
    """Goes through the data, and writes down who drew what."""

    def __init__(self, situation: dict[str, Any], chance: random.Random) -> None:
        self.situation, self.chance = situation, chance
        self.lengths: tuple[int, ...] = situation["lengths"]
        self.split = weighted(situation["weights"])
        self.cursor = Cursor(Progress(), (0,) * len(self.lengths))
        self.seen: dict[tuple[int, int], list[int]] = {}

    def go(self, epochs: int) -> None:
        goal = self._next_goal()
        while (before := self.cursor).progress.epoch < epochs:
            if goal == before.progress.examples:
                goal = self._next_goal()
            left = None if goal is None else goal - before.progress.examples
            batch = self.chance.choice(self.situation["batches"])
            args = (self.lengths, self.situation["workers"], batch, self.split, self.situation["micro"], left)
            if self.chance.random() < self.situation["together"]:
                drawn, steps = self._step(cut(before, *args)), 1
            else:
                drawn, steps = self._round(deal(before, *args), left)
                assert deal(as_saved(before), *args) == deal(before, *args)
            now = self.cursor.progress
            assert now.examples == before.progress.examples + drawn
            assert now.step == before.progress.step + steps
            assert now.examples == sum(map(len, self.seen.values()))
            assert now.epoch == now.examples // sum(self.lengths)
            # A worker's draws cut a hole into what is left: one range more, except at the front.
            assert len(self.cursor.ranges) < max(len(before.ranges), 1) + self.situation["workers"]

    def _next_goal(self) -> int | None:
        budget = self.situation["budget"]
        return None if budget is None else self.cursor.progress.examples + budget

    def _step(self, plan: Plan) -> int:
        for rank in range(self.situation["workers"]):
            self._take(plan, rank)
        self.cursor = advance(self.cursor, plan, self.lengths)
        return plan.batch

    def _round(self, hand: Hand, left: int | None) -> tuple[int, int]:
        rest = remaining(hand.begin, self.lengths)
        assert min(hand.stripes) >= 0
        assert 0 < sum(hand.stripes) <= min(sum(rest), sum(rest) if left is None else left)
        steps = [self._steps(size, most) for size, most in zip(hand.sizes, hand.stripes, strict=True)]
        drawn = [sum(self._take(draw(hand, at), rank) for at in range(own)) for rank, own in enumerate(steps)]
        assert tuple(drawn) == hand.drawn(steps)
        self.cursor = collect(hand, steps, self.lengths)
        assert self.cursor.pace == tuple(drawn)
        return sum(drawn), max(steps)

    def _steps(self, size: int, most: int) -> int:
        """One at least, which may be empty, and not more than there is; nothing if the worker leaves."""
        full = max(1, -(-most // size))
        return 0 if self.chance.random() < self.situation["leave"] else self.chance.choice([1, full, self._some(full)])

    def _some(self, full: int) -> int:
        return self.chance.randint(1, full)

    def _take(self, plan: Plan, rank: int) -> int:
        stream = rank if len(self.lengths) > 1 else 0
        found: list[int] = []
        for start, stop in plan.pieces(rank):
            spans = plan.spans(start, stop)
            piece = [at for first, last in spans for at in range(first, last)]
            assert 1 <= len(piece) == stop - start <= plan.micro
            found += piece
        assert len(found) == plan.counts[rank]
        assert plan.epoch == self.cursor.progress.epoch
        self.seen.setdefault((plan.epoch, stream), []).extend(found)
        return len(found)


@settings(max_examples=100, deadline=None)
@given(situations(), st.integers(0, 2**32).map(random.Random))
def test_every_example_once_in_every_epoch(situation: dict[str, Any], chance: random.Random) -> None:
    """Any numbers of steps, budgets, batches, and steps that all do together in between."""
    epochs = Epochs(situation, chance)
    epochs.go(3)
    for epoch in range(3):
        for stream, length in enumerate(situation["lengths"]):
            assert sorted(epochs.seen[epoch, stream]) == list(range(length))
    assert epochs.cursor.ranges == ()


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("course", [[1], [1, 2, 5, 20], [1, 1, 1, 60]], ids=["slow", "any", "bursts"])
def test_what_is_left_stays_in_few_ranges(workers: int, course: list[int]) -> None:
    """Every round may add one range for each worker but the first; draws at the front of the stripes use them up.

    The worst that one can do is to deal much, draw little, and do so again in the first of the stripes that are left,
    which is about ``workers`` times shorter: so the most that there can be grows like ``workers`` times the logarithm
    of the length. A search for the worst found 5.4 times the workers in 10,000 examples; in courses like these it was
    4.1 times in 100,000.
    """
    length, chance, worst = 10_000, random.Random(workers), 0
    cursor = Cursor(Progress(), (0,))
    while cursor.progress.epoch == 0:
        hand = deal(cursor, (length,), workers, 2 * workers, EVEN, None, None)
        cursor = collect(hand, [chance.choice(course) for _ in range(workers)], (length,))
        worst = max(worst, len(cursor.ranges))
    assert cursor.progress.examples == length
    assert workers - 1 <= worst < 8 * workers


def dealt(cursor: Cursor, length: int, left: int | None = None) -> Hand:
    return deal(cursor, (length,), 2, 10, EVEN, None, left)


def test_the_first_round_deals_everything() -> None:
    """Nobody's speed is known: all is dealt, in proportion to the shares."""
    hand = dealt(Cursor(Progress(), (0,)), 101)
    assert (hand.sizes, hand.stripes) == ((5, 5), (51, 50))
    assert dealt(Cursor(Progress(), (0,)), 101, left=40).stripes == (20, 20)
    assert dealt(Cursor(Progress(), (0,), pace=(3, 4, 5)), 101).stripes == (51, 50)  # of another number of workers


def test_later_rounds_deal_twice_what_was_drawn() -> None:
    """At least four steps; what there is not, is shared in proportion, so that all come to the end together."""
    cursor = Cursor(Progress(examples=100), (100,), pace=(75, 5))
    assert dealt(cursor, 1000).stripes == (150, 20)
    assert dealt(cursor, 180).stripes == (75, 5)
    assert dealt(cursor, 1000, left=16).stripes == (15, 1)


def test_own_data_is_dealt_to_its_owner() -> None:
    cursor = Cursor(Progress(examples=30), (10, 20), pace=(10, 20))
    assert deal(cursor, (10, 60), 2, 10, EVEN, None, None).stripes == (0, 40)
    assert deal(cursor, (30, 60), 2, 10, EVEN, None, 15).stripes == (5, 10)


def test_a_batch_of_more_than_there_is_is_dealt_like_all_there_is() -> None:
    """As a step of all workers together is cut, so that bounds of shares are the same, and known at the beginning."""
    split = BySpeed(most=10).split
    cursor = Cursor(Progress(), (0,))
    assert cut(cursor, (16,), 2, 99, split, None, None).counts == (8, 8)
    assert deal(cursor, (16,), 2, 99, split, None, None).sizes == (8, 8)
    assert deal(Cursor(Progress(), (0, 0)), (10, 6), 2, 99, split, None, None).sizes == (8, 8)


def test_draws_by_hand() -> None:
    """Two workers, stripes of 8 and 7 of what is left: positions 3 and 4, then all from 6 on."""
    begin = Cursor(Progress(step=4, epoch=1, examples=23), (4,), ranges=((3, 5), (6, 19)))
    hand = Hand(begin, (3, 2), (8, 7), 2, local=False)
    first, third, beyond = draw(hand, 0), draw(hand, 2), draw(hand, 4)
    assert (first.step, first.epoch, first.starts, first.counts) == (4, 1, (0, 8), (3, 2))
    assert (third.step, third.starts, third.counts) == (6, (6, 12), (2, 2))
    assert beyond.counts == (0, 0)
    assert [first.spans(*piece) for piece in first.pieces(0)] == [((3, 4),), ((4, 5), (6, 7))]
    now = collect(hand, [1, 4], (19,))
    assert now == Cursor(Progress(step=8, epoch=1, examples=33), (14,), ranges=((7, 12),), pace=(3, 7))
    assert collect(hand, [3, 4], (19,)) == Cursor(Progress(step=8, epoch=2, examples=38), (0,), pace=(8, 7))


def test_a_cursor_survives_a_file() -> None:
    cursor = Cursor(Progress(7, 1, 90), (20,), ranges=((3, 5), (9, 12)), pace=(8, 0, 3))
    file = io.BytesIO()
    torch.save({"cursor": plain_tree(msgspec.to_builtins(cursor))}, file)
    file.seek(0)
    assert msgspec.convert(torch.load(file, weights_only=True)["cursor"], Cursor) == cursor
    old = {"progress": {"step": 7, "epoch": 1, "examples": 90}, "taken": [20]}
    assert msgspec.convert(old, Cursor) == Cursor(Progress(7, 1, 90), (20,))
