"""Two workers that swap their numbers: the same sums whichever way these go."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from paceline.fleet import Fleet
from paceline.neighbour import Neighbour
from paceline.sync import swap
from paceline.sync.flat import FlatSum
from paceline.sync.swap import Memory, Messages, make_swap
from tests.pool import Pool

KINDS = [torch.float32, torch.float64, torch.bfloat16]


def numbers(rank: int, turn: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(1001, generator=torch.Generator().manual_seed(100 * turn + rank)).to(dtype)


def swapped(limit: int, dtype: torch.dtype) -> tuple[str, bool]:
    """Which way, and whether all was right in many swaps whose readers and writers take their time."""
    usual, swap.SHARED = swap.SHARED, limit
    fleet = Fleet.join(10.0)
    try:
        way = make_swap(fleet, torch.empty(1001, dtype=dtype))
        if way is None:
            return "None", True
        pause = random.Random(fleet.rank)
        right = True
        for turn in range(100):
            at = way.run(numbers(fleet.rank, turn, dtype), "the other's numbers")
            if pause.random() < 0.3:
                time.sleep(pause.random() * 5e-3)  # the other may be at its next swap by now
            right &= torch.equal(way.theirs[at], numbers(1 - fleet.rank, turn, dtype))
        return type(way).__name__, right
    finally:
        swap.SHARED = usual
        fleet.close()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_each_has_the_numbers_of_the_other_until_the_next_swap(pool: Pool, dtype: torch.dtype) -> None:
    assert pool.run(2, swapped, 1 << 26, dtype) == [(Memory.__name__, True)] * 2


def test_what_is_too_large_to_be_shared_goes_another_way(pool: Pool) -> None:
    assert pool.run(2, swapped, 1000, torch.float32) == [("None", True)] * 2


@contextmanager
def by(way: str) -> Iterator[None]:
    """Swap through shared memory, in messages, or not at all."""
    shared = {"memory": swap.SHARED, "messages": swap.SHARED, "ring": 0}[way]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap, "SHARED", shared)
        if way == "messages":
            patch.setattr(Neighbour, "meet", lambda group, size, able: None)
        yield


def without_memory() -> tuple[str, bool]:
    with by("messages"):
        return swapped(1 << 26, torch.float32)


def test_messages_where_memory_cannot_be_shared(pool: Pool) -> None:
    assert pool.run(2, without_memory) == [(Messages.__name__, True)] * 2


def sums(ways: tuple[str, ...], lazily: bool) -> list[list[Tensor]]:
    """Sums of several tensors of several kinds and layouts, in three rounds, by each way."""
    fleet = Fleet.join(10.0)
    found = []
    try:
        for way in ways:
            with by(way):
                found.append(_rounds(fleet, lazily, swaps=way != "ring"))
        return found
    finally:
        fleet.close()


def _rounds(fleet: Fleet, lazily: bool, swaps: bool) -> list[Tensor]:
    total, found = FlatSum(fleet), []
    for turn in range(3):
        image = numbers(fleet.rank, turn, torch.float32)[:960].view(4, 3, 8, 10)
        tensors = [
            image.to(memory_format=torch.channels_last),
            numbers(fleet.rank, turn, torch.float64),
            numbers(fleet.rank, turn, torch.float32)[:7],
        ]
        if not turn:
            total.lay_out(tensors, 0)
        total.pack(tensors, 0.5)
        total.run([], "the other's numbers", lazily=lazily)
        assert (total.others is not None) == (lazily and swaps)
        others = total.others or [torch.zeros_like(view) for view in total.views]
        found += [view + other for view, other in zip(total.views, others, strict=True)]
    return found


@pytest.mark.parametrize("lazily", [False, True])
def test_sums_are_the_same_by_memory_messages_and_the_ring(pool: Pool, lazily: bool) -> None:
    """To the bit, for two dtypes, and for images in either layout."""
    for ways in pool.run(2, sums, ("memory", "messages", "ring"), lazily):
        for turn in range(3):
            half = [0.5 * numbers(rank, turn, torch.float64) for rank in range(2)]
            assert torch.equal(ways[0][3 * turn + 1], half[0] + half[1])
        for other in ways[1:]:
            assert all(map(torch.equal, ways[0], other))
