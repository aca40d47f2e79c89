"""Sums over the workers: the same whichever way the numbers go."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from paceline import group
from paceline.fleet import Fleet
from paceline.group import Part
from tests.pool import Pool

SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (33, 5), (0,), (99,), (100,), (101,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64]


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    return torch.randint(-1000, 1000, shape, dtype=dtype, generator=generator)


def sums(swapped: int, part: bool) -> tuple[list[Tensor], int]:
    """What a worker finds, and how many of the sums were made by swapping; up to ``swapped`` bytes are swapped."""
    usual, group.SWAPPED = group.SWAPPED, swapped
    fleet = Fleet.join(10.0)
    one = Part(fleet, list(range(fleet.size))) if part else fleet
    swaps = 0

    def counted(sent: Tensor, received: Tensor, what: str) -> None:
        nonlocal swaps
        swaps += 1
        swap(sent, received, what)

    swap, one.swap = one.swap, counted  # type: ignore[method-assign]
    try:
        found = [numbers(fleet.rank, *each) for each in product(SHAPES, DTYPES)]
        for tensor in found:
            one.all_reduce(tensor, "the others' numbers")
        return found, swaps
    finally:
        group.SWAPPED = usual
        if isinstance(one, Part):
            one.close()
        fleet.close()


@pytest.mark.parametrize("part", [False, True], ids=["all", "part"])
@pytest.mark.parametrize("swapped", [0, 400, 1 << 20], ids=["none", "up to 400 bytes", "all"])
def test_two_workers_get_the_same_sum_either_way(pool: Pool, swapped: int, part: bool) -> None:
    """To the bit: each number is a sum of two. What is empty is not swapped."""
    expected = [numbers(0, *each) + numbers(1, *each) for each in product(SHAPES, DTYPES)]
    for found, swaps in pool.run(2, sums, swapped, part):
        assert all(map(torch.equal, found, expected))
        assert swaps == sum(0 < each.nbytes <= swapped for each in expected)


def test_three_workers_do_not_swap(pool: Pool) -> None:
    """All get the same bits; beyond that, three numbers may be added in any order."""
    (first, swaps), *others = pool.run(3, sums, 1 << 20, False)
    assert swaps == 0
    assert all(all(map(torch.equal, first, found)) for found, _ in others)
    at = list(product(SHAPES, DTYPES)).index(((33, 5), torch.float64))
    expected = sum(numbers(rank, (33, 5), torch.float64) for rank in range(3))
    torch.testing.assert_close(first[at], expected, rtol=0, atol=1e-14)


def gathered(part: bool) -> tuple[list[bytes], list[bytes]]:
    fleet = Fleet.join(10.0)
    one = Part(fleet, list(range(fleet.size))) if part else fleet
    try:
        own = b"x" * fleet.rank  # rank 0 has nothing to say
        return one.gather(own, "the others' words"), one.collect_bytes(own, "the others' words")
    finally:
        if isinstance(one, Part):
            one.close()
        fleet.close()


@pytest.mark.parametrize("part", [False, True], ids=["all", "part"])
def test_some_may_have_nothing_to_say(pool: Pool, part: bool) -> None:
    said = [b"", b"x", b"xx"]
    assert pool.run(3, gathered, part) == [(said, said), (said, []), (said, [])]
