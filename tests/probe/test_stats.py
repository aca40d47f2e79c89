from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.probe import between_unit_variance, gradient_stats, variance_from_sums, within_workers
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


def strata(generator: torch.Generator, units: Sequence[Sequence[int]]) -> tuple[list[Note], Tensor]:
    """Workers whose examples have means of their own and noise of their own size; and the averaged gradient."""
    notes, total, weight = [], torch.zeros(4, dtype=torch.float64), 0
    for rank, sizes in enumerate(units):
        examples = [rank + (1 + rank) * torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in sizes]
        own, n = torch.cat(examples).mean(0), sum(sizes)
        squares = sum(len(each) * float(each.mean(0).square().sum()) for each in examples)
        notes.append(
            Note(units=len(sizes), weight=n, unit_sqnorm=squares, measured=n, own_sqnorm=float(own.square().sum()))
        )
        total, weight = total + n * own, weight + n
    return notes, total / weight


def test_within_workers_it_is_the_variance_of_the_averaged_gradient() -> None:
    """Unbiased for unequal shares and units, where comparing all units with one mean takes the means for noise."""
    generator, units = torch.Generator().manual_seed(0), [(3, 5), (4, 4, 6), (1, 2, 2, 1)]
    draws = [strata(generator, units) for _ in range(10_000)]
    found = torch.tensor([gradient_stats(notes, 0.0, within=True).variance for notes, _ in draws])
    means = torch.stack([mean for _, mean in draws])
    sizes = [sum(each) for each in units]
    exact = sum(n * 4 * (1 + rank) ** 2 for rank, n in enumerate(sizes)) / sum(sizes)
    error = float(found.std()) / math.sqrt(len(draws))
    assert float(found.mean()) == pytest.approx(exact, abs=4 * error)
    # The empirical variance of 10,000 averages of four coordinates is good to 1 % (one standard deviation: 0.7 %).
    assert float(means.var(0).sum()) * sum(sizes) == pytest.approx(exact, rel=0.03)
    alike = [gradient_stats(notes, float(mean.square().sum())).variance for notes, mean in draws]
    assert sum(alike) / len(alike) > 1.2 * exact


def test_within_one_worker_it_is_the_same() -> None:
    notes, mean = strata(torch.Generator().manual_seed(1), [(3, 5, 2)])
    sqnorm = float(mean.square().sum())
    assert gradient_stats(notes, sqnorm, within=True).variance == pytest.approx(gradient_stats(notes, sqnorm).variance)


def test_workers_with_one_unit_are_taken_to_be_like_the_others() -> None:
    notes, _ = strata(torch.Generator().manual_seed(1), [(3, 5), (4,)])
    assert within_workers(notes) == within_workers([notes[0], Note()]) == within_workers(notes[:1])
    assert math.isnan(within_workers(notes[1:]))
    assert math.isnan(within_workers([Note(), Note()]))


def test_one_unit_in_all_gives_nan_statistics() -> None:
    stats = gradient_stats([Note(units=1, weight=4, unit_sqnorm=4.0), Note()], 1.0)
    assert stats.units == 1
    assert math.isnan(stats.variance)
