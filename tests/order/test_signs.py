"""Signs: each rule by its formula, and the same from a Gram matrix as one vector after the other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import SettingError
from paceline.order import Greedy, Halving, Walk, herding_bound
from paceline.order.signs import Rule, gram_signs, halving_threshold, walk_probability

RULES: dict[str, Any] = {
    "greedy": lambda: Greedy(),
    "walk": lambda: Walk(limit=2.0, seed=3),
    "halving": lambda: Halving(pairs=200, epochs=5, seed=3),
}


def vectors(count: int, size: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(count, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def one_by_one(rows: Tensor, running: Tensor, rule: Rule) -> tuple[list[int], Tensor]:
    """As the papers write it."""
    signs = []
    for row in rows:
        signs.append(rule.sign(float(row @ running), float(row @ row)))
        running = running + signs[-1] * row
    return signs, running


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("count", [0, 1, 7, 200])
def test_signs_from_the_gram_matrix_are_the_sequential_ones(name: str, count: int) -> None:
    rows, running = vectors(count), vectors(1, seed=9)[0]
    first, second = RULES[name](), RULES[name]()
    first.begin()
    second.begin()
    assert gram_signs(rows @ running, rows @ rows.T, first) == one_by_one(rows, running, second)[0]


def test_greedy_keeps_the_sum_smaller() -> None:
    running = torch.zeros(16, dtype=torch.float64)
    for row in vectors(300):
        sign = Greedy().sign(float(row @ running), float(row @ row))
        assert (running + sign * row).norm() <= (running - sign * row).norm() + 1e-12
        running = running + sign * row
    assert Greedy().sign(0.0, 1.0) == 1  # where both are as good


@given(st.floats(-10, 10), st.floats(0.01, 100), st.floats(0.1, 100))
def test_the_walks_probability(product: float, sqnorm: float, limit: float) -> None:
    found = walk_probability(product, sqnorm, limit)
    assert 0 <= found <= 1
    assert found == pytest.approx(min(1, max(0, 0.5 - (product / sqnorm) / (2 * limit))))
    assert found == pytest.approx(1 - walk_probability(-product, sqnorm, limit))  # the other sign
    # Vectors that are k times as long, and so their sum: the same.
    assert walk_probability(9 * product, 9 * sqnorm, limit) == pytest.approx(found)


def test_the_walk_is_as_often_right_as_its_probability_says() -> None:
    rule = Walk(limit=2.0, seed=1)
    draws = 10_000
    ones = sum(rule.sign(1.0, 1.0) == 1 for _ in range(draws))
    assert ones / draws == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / draws))


def test_the_threshold_of_halving() -> None:
    assert halving_threshold(0.0, 4.0, 3.0) == (4.0, 8.0)  # the first one: r = 0
    # r² = 8 · 3 / 4 = 6: a = r b², and the state grows by 2 b² (L + 1/2 - r) / L.
    ratio = math.sqrt(6)
    assert halving_threshold(8.0, 4.0, 3.0) == pytest.approx((4 * ratio, 8 + 8 * (3.5 - ratio) / 3))
    assert halving_threshold(1e6, 4.0, 3.0)[1] == 1e6  # large enough: it stays
    assert halving_threshold(5.0, 0.0, 3.0) == (0.0, 5.0)


@pytest.mark.parametrize("name", RULES)
def test_partial_sums_stay_small(name: str) -> None:
    """Of 4,000 random vectors, against signs at random."""
    rows = vectors(4000)
    chance = (2.0 * torch.randint(2, (4000, 1), generator=torch.Generator().manual_seed(5)) - 1).double()
    rule = RULES[name]()
    rule.begin()
    signs = torch.tensor(one_by_one(rows, torch.zeros(16, dtype=torch.float64), rule)[0]).double().unsqueeze(1)
    largest = [float((each * rows).cumsum(0).abs().max()) for each in (signs, chance)]
    assert largest[0] < 0.5 * largest[1]


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=10, deadline=None)
@given(at=st.integers(0, 30))
def test_a_rule_goes_on_from_its_state(name: str, at: int) -> None:
    rows, running = vectors(40), torch.zeros(16, dtype=torch.float64)
    whole, again = RULES[name](), RULES[name]()
    whole.begin()
    expected, _ = one_by_one(rows, running, whole)
    first = RULES[name]()
    first.begin()
    begun, running = one_by_one(rows[:at], running, first)
    again.load_state_dict(first.state_dict())
    assert begun + one_by_one(rows[at:], running, again)[0] == expected


def test_the_herding_bound_by_hand() -> None:
    rows = torch.tensor([[1.0, 0.0], [1.0, 2.0], [-2.0, 1.0]])  # their mean is (0, 1)
    assert herding_bound(rows) == pytest.approx(2.0)  # after one (1, -1), after two (2, 0), after three 0
    assert herding_bound(torch.stack([rows, rows])) == pytest.approx(4.0)
    assert herding_bound(torch.zeros(0, 3)) == 0.0


def test_bad_settings() -> None:
    with pytest.raises(SettingError, match=r"Walk: limit \(0\) must be positive"):
        Walk(limit=0)
    with pytest.raises(SettingError, match=r"Halving: pairs \(0\) and epochs \(5\) must be at least 1"):
        Halving(pairs=0, epochs=5)
    with pytest.raises(SettingError, match=r"Halving: delta \(1\) must be above 0 and below 1"):
        Halving(pairs=1, epochs=5, delta=1)
