"""Averages of models that are asked for: weights, silence, and what is not a number."""

from __future__ import annotations

import pytest
import torch

from paceline.gossip.gathering import ALIVE, POLL, TRIES, Gathering
from paceline.gossip.messages import Await, Fetch


def gathering(own: torch.Tensor, weight: int = 1) -> Gathering:
    return Gathering(7, 0, own, weight, final=True, patience=10.0, extent=(own.numel(), own.numel()))


def test_who_lives_is_asked_for_its_model() -> None:
    found = gathering(torch.zeros(2))
    found.include(1, now=0.0)
    assert found.questions(0.0) == [(1, Await(7))]
    assert found.questions(0.1) == []
    found.later(1, 0.2)
    assert found.questions(0.2) == [(1, Fetch(7, True))]
    found.later(1, 0.3)  # it has not come to its end yet
    assert found.questions(0.3 + POLL / 2) == []
    assert found.questions(0.3 + POLL) == [(1, Fetch(7, True))]
    found.take(1, torch.ones(2), 3)
    assert found.done
    assert found.members == [0, 1]
    assert found.mean().tolist() == [0.75, 0.75]
    assert found.distance() == pytest.approx((3 / 16 * 2) ** 0.5)


def test_who_is_dead_is_left_out_after_a_few_questions() -> None:
    found = gathering(torch.zeros(2))
    found.include(1, now=0.0)
    now, asked = 0.0, 0
    while not found.done:
        asked += len(found.questions(now))
        now += 0.01
    assert asked == TRIES
    assert now == pytest.approx(ALIVE * (2**TRIES - 1), abs=0.05)
    found.take(1, torch.ones(2), 5)  # too late
    assert found.members == [0]
    found.include(1, now)  # once is enough
    assert found.done


def test_what_is_not_finite_does_not_count() -> None:
    found = gathering(torch.tensor([float("nan"), 1.0]), weight=100)
    for member, value in ((1, 2.0), (2, float("inf")), (3, 6.0)):
        found.include(member, now=0.0)
        found.questions(0.0)
        found.take(member, torch.full((2,), value), 1)
    assert found.members == [1, 3]
    assert found.mean().tolist() == [4.0, 4.0]


def test_models_that_nobody_has_trained() -> None:
    found = gathering(torch.ones(2), weight=0)
    found.include(1, now=0.0)
    found.take(1, torch.ones(2), 0)
    assert found.mean().tolist() == [1.0, 1.0]
    assert found.distance() == 0.0


def test_who_leaves_is_not_waited_for() -> None:
    found = gathering(torch.ones(2))
    found.include(1, now=0.0)
    assert found.missing == [1]
    found.forget([1])
    assert found.done
    assert found.due is None


def test_what_is_not_trained_may_be_infinite() -> None:
    """As masks are: the same on all workers, it stays; and it does not make a model unsound."""
    mask = torch.tensor([0.0, -torch.inf])
    found = Gathering(7, 0, torch.cat([torch.zeros(3), mask]), 1, final=True, patience=10.0, extent=(3, 3))
    found.include(1, now=0.0)
    found.take(1, torch.cat([torch.ones(3), mask]), 3)
    assert found.members == [0, 1]
    assert torch.equal(found.mean(), torch.cat([torch.full((3,), 0.75), mask]))
    assert found.distance() == pytest.approx(0.75)  # the root of (3 · 0.75² + 3 · 3 · 0.25²) / 4


def test_if_no_model_is_sound_the_own_one_stays() -> None:
    """Not zeros, which would look like a model."""
    found = Gathering(7, 0, torch.full((3,), torch.nan), 1, final=True, patience=10.0, extent=(3, 3))
    found.include(1, now=0.0)
    found.take(1, torch.full((3,), torch.inf), 3)
    assert found.done
    assert found.members == []
    assert found.mean().isnan().all()


@pytest.mark.parametrize("final", [False, True])
def test_who_is_away_is_not_waited_for(final: bool) -> None:
    found = Gathering(7, 0, torch.zeros(3), 1, final=final, patience=10.0, extent=(3, 3))
    for member in (1, 2):
        found.include(member, now=0.0)
        found.questions(0.0)
        found.later(member, 0.1)  # it lives
    found.later(1, 0.2, away=True)
    assert found.missing == [2]
    found.later(2, 0.2)  # it has nothing to give yet: at the end that is waited for
    assert found.missing == ([2] if final else [])
