from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.probe import between_unit_variance, gradient_stats, variance_from_sums
from paceline.records import Note


def estimate(gradients: Tensor, sizes: list[int]) -> float:
    means = torch.stack([part.mean(0) for part in torch.split(gradients, sizes)])
    mean_sqnorm = float(gradients.mean(0).square().sum())
    return between_unit_variance(sizes, means.square().sum(1).tolist(), mean_sqnorm)


@pytest.mark.parametrize("sizes", [[1] * 6, [2, 2, 2], [1, 2, 3], [5, 1], [3, 3], [1, 1, 4]])
def test_every_grouping_gives_the_sample_variance_on_average(sizes: list[int]) -> None:
    # Over all orders of the same six gradients the mean of the estimate is their variance with ddof 1: an
    # exact statement, so the tolerance is only for rounding.
    gradients = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    estimates = [estimate(gradients[list(order)], sizes) for order in itertools.permutations(range(6))]
    expected = float(gradients.var(0, correction=1).sum())
    assert math.fsum(estimates) / len(estimates) == pytest.approx(expected, rel=1e-9)


def test_it_is_the_weighted_spread_of_the_units() -> None:
    gradients = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = torch.tensor([2.0, 7.0, 0.5], dtype=torch.float64)
    mean = (sizes[:, None] * gradients).sum(0) / sizes.sum()
    spread = float((sizes * (gradients - mean).square().sum(1)).sum())
    found = between_unit_variance(sizes.tolist(), gradients.square().sum(1).tolist(), float(mean.square().sum()))
    assert found == pytest.approx(spread / 2)


def test_fewer_than_two_units_tell_nothing() -> None:
    assert math.isnan(between_unit_variance([], [], 0.0))
    assert math.isnan(between_unit_variance([8], [3.0], 3.0))
    assert math.isnan(variance_from_sums(1, 8, 24.0, 3.0))


def test_it_may_be_negative_rather_than_biased() -> None:
    assert variance_from_sums(3, 10.0, 8.0, 1.0) == -1.0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0, 50)), min_size=2, max_size=12),
    st.integers(1, 4),
    st.floats(0, 5),
)
def test_workers_units_are_pooled(units: list[tuple[int, float]], workers: int, mean_sqnorm: float) -> None:
    notes = []
    for rank in range(workers):
        own = units[rank::workers]
        notes.append(
            Note(
                units=len(own),
                weight=sum(size for size, _ in own),
                unit_sqnorm=sum(size * sqnorm for size, sqnorm in own),
            )
        )
    stats = gradient_stats(notes, mean_sqnorm)
    sizes, sqnorms = zip(*units, strict=True)
    assert stats.units == len(units)
    assert stats.weight == sum(sizes)
    assert stats.mean_sqnorm == mean_sqnorm
    assert stats.variance == pytest.approx(between_unit_variance(sizes, sqnorms, mean_sqnorm), abs=1e-9)


def test_one_unit_in_all_gives_nan_statistics() -> None:
    stats = gradient_stats([Note(units=1, weight=4, unit_sqnorm=4.0), Note()], 1.0)
    assert stats.units == 1
    assert math.isnan(stats.variance)
