"""Every test of a batch against its definition with per-example gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.batch.criteria import (
    augmented_batch,
    coordinate_batch,
    inner_product_batch,
    next_size,
    norm_test_batch,
    orthogonality_batch,
    tensor_batch,
)
from paceline.probe.coordinates import coordinate_variances
from paceline.probe.stats import gradient_stats, spread_along, variance_along
from paceline.records import GradientStats, Note


def problem(seed: int, examples: int = 12, length: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(length, generator=generator, dtype=torch.float64) * 3
    mean = torch.randn(length, generator=generator, dtype=torch.float64)
    return mean + spread * torch.randn(examples, length, generator=generator, dtype=torch.float64)


def stats_of(gradients: Tensor, sizes: list[int] | None = None) -> tuple[GradientStats, float]:
    """As a run makes them, from the gradients of units: the statistics, and the variance along the mean."""
    sizes = sizes or [1] * len(gradients)
    units = [part.mean(0) for part in torch.split(gradients, sizes)]
    mean = gradients.mean(0)
    squares = sum(n * float(unit @ unit) for n, unit in zip(sizes, units, strict=True))
    note = Note(weight=len(gradients), units=len(sizes), unit_sqnorm=squares)
    stats = gradient_stats([note], float(mean @ mean))
    products = [float(unit @ mean) for unit in units]
    spread = spread_along(
        stats.units,
        stats.weight,
        sum(n * each for n, each in zip(sizes, products, strict=True)),
        sum(n * each * each for n, each in zip(sizes, products, strict=True)),
    )
    along = variance_along(stats, spread)
    return stats, along


@pytest.mark.parametrize("seed", range(20))
def test_each_test_is_its_definition(seed: int) -> None:
    gradients = problem(seed)
    b, mean = len(gradients), gradients.mean(0)
    sqnorm = float(mean @ mean)
    stats, along = stats_of(gradients)
    eta, theta, nu = 0.4, 0.3, 0.5
    # The definitions, one after the other, word for word.
    noise = float((gradients - mean).square().sum()) / (b * (b - 1))
    assert (noise <= eta**2 * sqnorm) == (b >= norm_test_batch(stats.variance, sqnorm, eta))
    products = gradients @ mean
    assert (float(products.var(correction=1)) / b <= theta**2 * sqnorm**2) == (
        b >= inner_product_batch(along, sqnorm, theta)
    )
    across = gradients - (products / sqnorm)[:, None] * mean
    orthogonal = float(across.square().sum()) / (b * (b - 1))
    assert (orthogonal <= nu**2 * sqnorm) == (b >= orthogonality_batch(stats.variance, along, sqnorm, nu))
    # And as the papers' growth rules have them.
    assert norm_test_batch(stats.variance, sqnorm, eta) == pytest.approx(
        float(gradients.var(0, correction=1).sum()) / (eta**2 * sqnorm)
    )
    by_inner = float(products.var(correction=1)) / (theta**2 * sqnorm**2)
    by_orthogonality = orthogonal * b / (nu**2 * sqnorm)
    assert augmented_batch(stats.variance, along, sqnorm, theta, nu) == pytest.approx(max(by_inner, by_orthogonality))


@pytest.mark.parametrize("seed", range(5))
def test_augmented_and_norm_test_agree_by_pythagoras(seed: int) -> None:
    stats, along = stats_of(problem(seed))
    theta = 0.5
    # nu such that both ask for the same: then so does the norm test with eta^2 = theta^2 + nu^2.
    nu = theta * math.sqrt((stats.variance - along) / along)
    both = augmented_batch(stats.variance, along, stats.mean_sqnorm, theta, nu)
    assert norm_test_batch(stats.variance, stats.mean_sqnorm, math.hypot(theta, nu)) == pytest.approx(both)


@given(st.integers(2, 2000), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(0.05, 0.95))
def test_a_finite_population(population: int, variance: float, sqnorm: float, eta: float) -> None:
    asked = norm_test_batch(variance, sqnorm, eta, population)
    assert 0 < asked <= population
    noise = variance / asked * (population - asked) / (population - 1)
    assert noise == pytest.approx(eta**2 * sqnorm, rel=1e-6, abs=1e-9 * variance)
    assert asked <= norm_test_batch(variance, sqnorm, eta) * population / (population - 1)


def test_no_gradient_and_no_noise() -> None:
    assert norm_test_batch(1.0, 0.0, 0.5) == math.inf
    assert norm_test_batch(1.0, 0.0, 0.5, population=100) == 100
    assert norm_test_batch(0.0, 0.0, 0.5) == 0.0
    assert norm_test_batch(-1.0, 1.0, 0.5) == 0.0  # an unbiased estimate may be


@pytest.mark.parametrize("quantile", [0.5, 0.9, 1.0])
def test_coordinates(quantile: float) -> None:
    gradients = problem(3, examples=9, length=40)
    mean, variances = gradients.mean(0), gradients.var(0, correction=1)
    eta = 0.5
    asked = coordinate_batch(variances.clone(), mean, eta, quantile)

    def passing(batch: float) -> float:
        return float((variances / batch <= (eta * mean).square() * (1 + 1e-9)).double().mean())

    assert passing(asked) >= quantile
    assert passing(asked * (1 - 1e-6)) < quantile
    if quantile == 1.0:
        assert asked == pytest.approx(float((variances / (eta * mean).square()).max()))


def test_coordinates_without_noise_ask_for_nothing() -> None:
    assert coordinate_batch(torch.zeros(3), torch.zeros(3), 0.5) == 0.0


def test_tensors_count_as_many_coordinates_as_they_have() -> None:
    variances, sqnorms = torch.tensor([1.0, 100.0, 10.0]), torch.ones(3)
    sizes = torch.tensor([80, 5, 15])
    assert tensor_batch(variances, sqnorms, sizes, 0.5) == pytest.approx(400)
    assert tensor_batch(variances, sqnorms, sizes, 0.5, 0.95) == pytest.approx(40)
    assert tensor_batch(variances, sqnorms, sizes, 0.5, 0.8) == pytest.approx(4)


@pytest.mark.parametrize("sizes", [[1] * 12, [3, 3, 3, 3], [1, 5, 2, 4], [6, 6]])
def test_coordinate_variances_of_groups(sizes: list[int]) -> None:
    # Averaged over many orders of the same examples, a grouping gives their variance with ddof 1.
    gradients = problem(1)
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(4000):
        mixed = gradients[torch.randperm(len(gradients), generator=generator)]
        units = [part.mean(0) for part in torch.split(mixed, sizes)]
        squares = sum((n * unit.square() for n, unit in zip(sizes, units, strict=True)), torch.zeros(7))
        found.append(squares - len(mixed) * mixed.mean(0).square())
    mean = torch.stack(found).mean(0) / (len(sizes) - 1)
    # 4000 draws of an estimate with a relative deviation of at most sqrt(2): 2 % at one sigma, four of them.
    torch.testing.assert_close(mean, gradients.var(0, correction=1), rtol=0.09, atol=0)
    one = coordinate_variances(torch.full((7,), 5.0), torch.ones(7), 3, 2.0)
    torch.testing.assert_close(one, torch.full((7,), 1.5))


@pytest.mark.parametrize("sizes", [[1] * 12, [3, 3, 3, 3], [1, 5, 2, 4]])
def test_the_variance_along_a_direction_is_unbiased_for_every_grouping(sizes: list[int]) -> None:
    # The direction is the mean over all, which is the same for every order of the examples.
    gradients = problem(2)
    mean = gradients.mean(0)
    expected = float((gradients @ mean).var(correction=1) / (mean @ mean))
    generator = torch.Generator().manual_seed(0)
    draws = 10_000
    found = [stats_of(gradients[torch.randperm(len(gradients), generator=generator)], sizes)[1] for _ in range(draws)]
    values = torch.tensor(found, dtype=torch.float64)
    assert float(values.mean()) == pytest.approx(expected, abs=4 * float(values.std()) / math.sqrt(draws) + 1e-9)


SETTINGS = {"smallest": 8, "limit": 1000, "growth": 2.0, "shrink": None, "multiple": 1}


def size_after(size: int, asked: float, **changes: object) -> int:
    return next_size(size, asked, **{**SETTINGS, **changes})  # type: ignore[arg-type]


def test_sizes() -> None:
    assert size_after(64, 64.0) == 64
    assert size_after(64, 64.5) == 65
    assert size_after(64, 1e9) == 128
    assert size_after(64, math.inf, growth=math.inf) == 1000
    assert size_after(900, math.inf) == 1000
    assert size_after(64, 3.0) == 64
    assert size_after(64, 3.0, shrink=0.5) == 32
    assert size_after(64, 31.0, shrink=0.5) == 32
    assert size_after(64, 33.0, shrink=0.5) == 64
    assert size_after(12, 3.0, shrink=0.5) == 8
    assert size_after(64, 65.0, multiple=32) == 96
    assert size_after(992, 999.0, multiple=32) == 992
    assert size_after(1000, 2000.0, multiple=32) == 1000
    assert size_after(900, 2000.0, multiple=32) == 992
    assert size_after(96, 200.0, growth=1.5, multiple=32) == 128  # 144 is the most
    assert size_after(32, 33.0, multiple=128) == 32  # 64 is the most, and no multiple
    assert size_after(100, 85.0, shrink=0.9, multiple=64) == 100  # what asks for less does not make it larger
    assert size_after(128, 60.0, shrink=0.9, multiple=64) == 64


@given(
    st.integers(8, 1000),
    st.floats(0, 1e6),
    st.floats(1.01, 8),
    st.one_of(st.none(), st.floats(0.1, 0.9)),
    st.integers(1, 64),
)
def test_a_size_stays_within_its_bounds(
    size: int, asked: float, growth: float, shrink: float | None, multiple: int
) -> None:
    found = size_after(size, asked, growth=growth, shrink=shrink, multiple=multiple)
    assert 8 <= found <= 1000
    assert found <= size * growth
    assert found >= size or (shrink is not None and asked < shrink * size)
    assert found <= size or asked > size
    assert found >= min(asked, size * growth // multiple * multiple, 1000 // multiple * multiple) or found == size
    assert found % multiple == 0 or found in (size, 8)
