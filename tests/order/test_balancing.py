"""Orders out of gradients: herding bounds that halve, streams that act together, and nothing lost or used twice."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import LoopError, SettingError
from paceline.order import Greedy, MeanBalancer, PairBalancer, herding_bound
from paceline.order.balancing import pair_reorder, reorder

SIZE = 16


def vectors(*shape: int, seed: int = 0) -> Tensor:
    """Uniform, as in the papers' picture: with a mean, which cancels."""
    return torch.rand(*shape, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_where_units_go() -> None:
    assert reorder([5, 6, 7, 8], [1, -1, 1, -1]) == [5, 7, 8, 6]
    assert pair_reorder([5, 6, 7, 8], [1, -1]) == [5, 8, 7, 6]
    assert pair_reorder([5, 6, 7, 8, 9], [1, -1]) == [5, 8, 9, 7, 6]  # who has no partner is in the middle
    assert pair_reorder([5], []) == [5]


def pair_grab(units: list[int], gradients: Tensor, epochs: int) -> list[int]:
    """PairGraB as the paper writes it, one step after the other."""
    for _ in range(epochs):
        running, front, back = torch.zeros(SIZE, dtype=torch.float64), list[int](), list[int]()
        for first, second in zip(units[::2], units[1::2], strict=False):
            difference = gradients[first] - gradients[second]
            if float(running @ difference) <= 0:
                front, back, running = [*front, first], [second, *back], running + difference
            else:
                front, back, running = [*front, second], [first, *back], running - difference
        units = front + (units[-1:] if len(units) % 2 else []) + back
    return units


def grab(units: list[int], gradients: Tensor, epochs: int) -> list[int]:
    """GraB as the paper writes it: the mean is that of the epoch before, taken before anything is subtracted."""
    mean = torch.zeros(SIZE, dtype=torch.float64)
    for _ in range(epochs):
        running, fresh = torch.zeros(2, SIZE, dtype=torch.float64)
        front, back = list[int](), list[int]()
        for unit in units:
            fresh += gradients[unit] / len(units)
            centred = gradients[unit] - mean
            if float(running @ centred) <= 0:
                front, running = [*front, unit], running + centred
            else:
                back, running = [unit, *back], running - centred
        units, mean = front + back, fresh
    return units


def learnt(balancer: Any, orders: list[list[int]], gradients: Tensor, epochs: int, piece: int = 3) -> list[list[int]]:
    """The orders after so many epochs of gradients that do not change, shown in pieces, stream by stream in turn."""
    for _ in range(epochs):
        for begin in range(0, max(map(len, orders)), piece):
            for stream, order in enumerate(orders):
                if order[begin : begin + piece]:
                    balancer.observe(gradients[order[begin : begin + piece]], stream)
        orders = balancer.next_orders()
    return orders


@pytest.mark.parametrize("count", [1, 2, 7, 64, 1001])
@pytest.mark.parametrize("piece", [1, 3, 2000])
def test_one_stream_is_what_the_papers_write(count: int, piece: int) -> None:
    gradients, units = vectors(count), torch.randperm(count).tolist()
    assert learnt(PairBalancer([units]), [units], gradients, 3, piece) == [pair_grab(units, gradients, 3)]
    assert learnt(MeanBalancer([units]), [units], gradients, 3, piece) == [grab(units, gradients, 3)]


def cd_grab(orders: list[list[int]], gradients: Tensor, epochs: int) -> list[list[int]]:
    """CD-GraB with one running sum: pair after pair, and in each of them worker after worker."""
    for _ in range(epochs):
        running = torch.zeros(SIZE, dtype=torch.float64)
        signs: list[list[int]] = [[] for _ in orders]
        for pair in range(max(map(len, orders)) // 2):
            for order, each in zip(orders, signs, strict=True):
                if pair < len(order) // 2:
                    difference = gradients[order[2 * pair]] - gradients[order[2 * pair + 1]]
                    each.append(1 if float(running @ difference) <= 0 else -1)
                    running += each[-1] * difference
        orders = [pair_reorder(order, each) for order, each in zip(orders, signs, strict=True)]
    return orders


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5), seed=st.integers(0, 100), piece=st.integers(1, 70))
def test_many_streams_are_what_the_paper_writes(lengths: list[int], seed: int, piece: int) -> None:
    """Of any lengths, shown in any pieces: every order is a permutation of its stream's own units."""
    gradients = vectors(sum(lengths), seed=seed)
    units = torch.split(torch.arange(sum(lengths)), lengths)
    orders = [each.tolist() for each in units]
    found = learnt(PairBalancer(orders), orders, gradients, 3, piece)
    assert found == cd_grab(orders, gradients, 3)
    assert [sorted(order) for order in found] == orders


def bounds(workers: int, units: int, epochs: int, **options: Any) -> list[float]:
    """The herding bound before every epoch, and after the last."""
    gradients = vectors(workers * units)
    orders = torch.randperm(workers * units, generator=torch.Generator().manual_seed(1)).view(workers, units).tolist()
    balancer = PairBalancer(orders, Greedy(), **options)
    found = [herding_bound(gradients[torch.tensor(orders)])]
    for _ in range(epochs):
        orders = learnt(balancer, orders, gradients, 1, units)
        found.append(herding_bound(gradients[torch.tensor(orders)]))
    return found


def test_the_bound_halves_down_to_a_constant_that_the_number_of_workers_does_not_change() -> None:
    """12,000 random vectors on 1 to 40 workers; with sums of their own the bound grows with the workers."""
    together = {workers: bounds(workers, 12_000 // workers, 8) for workers in (1, 5, 40)}
    for found in together.values():
        assert found[0] > 20  # of a random order
        for before, after in pairwise(found[:5]):
            assert after <= 0.5 * before + 2.5  # (H + A) / 2 with signed sums A of some units
        assert found[-1] < 4
    apart = {workers: bounds(workers, 12_000 // workers, 8, coordinated=False)[-1] for workers in (5, 40)}
    assert apart[40] > 1.5 * apart[5]
    assert apart[40] > 2 * together[40][-1]


def test_shuffling_leaves_the_bound_where_it_is() -> None:
    gradients = vectors(4000)
    found = [
        herding_bound(gradients[torch.randperm(4000, generator=torch.Generator().manual_seed(k))]) for k in range(8)
    ]
    assert min(found) > 5


def test_an_order_depends_on_the_gradients() -> None:
    """The published code keeps a buffer that is used again: all its differences are zero, and so no order does."""
    units = list(range(64))
    orders = set()
    for seed in range(3):
        gradients, buffer = vectors(64, seed=seed), torch.empty(1, SIZE, dtype=torch.float64)
        balancer = PairBalancer([units])
        for unit in units:
            balancer.observe(buffer.copy_(gradients[unit]))
        orders.add(tuple(balancer.next_orders()[0]))
    assert len(orders) == 3


@pytest.mark.parametrize("kind", ["pairs", "own sums", "mean"])
@settings(max_examples=25, deadline=None)
@given(at=st.integers(0, 90))
def test_resume_at_any_unit_is_never_having_stopped(kind: str, at: int) -> None:
    units = [list(range(15)), list(range(15, 30))]
    if kind == "mean":
        units = [list(range(30))]
    gradients = vectors(30)

    def make() -> Any:
        return MeanBalancer(units) if kind == "mean" else PairBalancer(units, coordinated=kind == "pairs")

    def run(balancer: Any, orders: list[list[int]], done: int, until: int) -> list[list[int]]:
        length = len(orders[0])
        for step in range(done, until):
            for stream, order in enumerate(orders):
                balancer.observe(gradients[order[step % length : step % length + 1]], stream)
            if step % length == length - 1:
                orders = balancer.next_orders()
        return orders

    steps = 3 * len(units[0])
    at = min(at, steps)
    expected = run(make(), units, 0, steps)
    first, again = make(), make()
    begun = run(first, units, 0, at)
    again.load_state_dict(first.state_dict())
    assert run(again, begun, at, steps) == expected


def test_what_is_given_must_fit() -> None:
    balancer = PairBalancer([[0, 1, 2]])
    with pytest.raises(LoopError, match=r"gradients of shape \(16,\) were given; a row for each unit is needed"):
        balancer.observe(torch.zeros(16))
    balancer.observe(torch.zeros(2, 16))
    with pytest.raises(LoopError, match=r"2 gradients were given, but of the 3 units of the epoch 1 are left"):
        balancer.observe(torch.zeros(2, 16))
    with pytest.raises(LoopError, match=r"gradients of 2 of 3 units were seen; give those of all units to observe"):
        balancer.next_orders()
    with pytest.raises(SettingError, match="there is nothing to order"):
        PairBalancer([[0], []])
    with pytest.raises(SettingError, match="MeanBalancer balances one stream, not 2"):
        MeanBalancer([[0], [1]])


def test_a_rounded_mean_leaves_differences_with_few_bits() -> None:
    """Also where gradients nearly cancel, so that the mean is small: else products would not be exact."""
    rows = torch.randint(-(2**14), 2**14, (65, 8), generator=torch.Generator().manual_seed(3)).double()
    rows[-1] = 1 - rows[:-1].sum(0)  # of all the sum is 1: the mean, 1 / 65, has as many bits as a double
    balancer = MeanBalancer([range(65)], rounded=True)
    balancer.observe(rows)
    balancer.next_orders()
    mean = balancer.state_dict()["mean"]
    assert torch.equal(rows - mean, torch.round(rows - mean))
