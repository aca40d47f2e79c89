"""Noise along the mean gradient, and the squares of coordinates, from sketches and exactly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from paceline.probe import Probe, spread_along, variance_along
from paceline.probe.stats import gradient_stats
from paceline.records import GradientStats, Note
from paceline.roles import Need
from tests.probe.models import drive_gradients

LENGTH = 3000
UNITS = 8
SIZES = [3.0, 5.0, 4.0, 8.0, 2.0, 6.0, 7.0, 5.0]


def problem() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(LENGTH, generator=generator, dtype=torch.float64) / math.sqrt(LENGTH)
    noise = torch.randn(UNITS, LENGTH, generator=generator, dtype=torch.float64) * math.sqrt(4 / LENGTH)
    shared = torch.randn(UNITS, 1, generator=generator, dtype=torch.float64)  # along the mean
    return mean + noise + shared * mean


def drive(probe: Probe, needs: frozenset[Need]) -> nn.Parameter:
    """One step of one worker; ``.grad`` is the weighted mean at its end."""
    parameter = nn.Parameter(torch.zeros(LENGTH, dtype=torch.float64))
    probe.attach(nn.ParameterList([parameter]), [parameter], needs)
    total = sum(SIZES)
    drive_gradients(probe, parameter, problem(), SIZES, [size / total for size in SIZES])
    return parameter


def along_of(probe: Probe) -> float:
    parameter = drive(probe, frozenset({Need.VARIANCE, Need.DIRECTION}))
    units, squares = probe.numbers()
    assert parameter.grad is not None
    note = Note(weight=sum(SIZES), units=units, unit_sqnorm=squares)
    stats = gradient_stats([note], float(parameter.grad.square().sum()))
    spread = spread_along(stats.units, stats.weight, *probe.towards_mean(1.0))
    return variance_along(stats, spread, blur=probe.blur)


def truth() -> float:
    gradients, weights = problem(), torch.tensor(SIZES, dtype=torch.float64)
    mean = (weights[:, None] * gradients).sum(0) / weights.sum()
    products = gradients @ mean
    spread = (weights * (products - mean @ mean).square()).sum() / (UNITS - 1)
    return float(spread / (mean @ mean))


def test_exactly() -> None:
    assert along_of(Probe(exact=True)) == pytest.approx(truth(), rel=1e-9)


def test_sketches_are_right_on_average() -> None:
    draws = 1500
    found = torch.tensor([along_of(Probe(size=61, seed=seed)) for seed in range(draws)])
    error = float(found.std()) / math.sqrt(draws)
    assert float(found.mean()) == pytest.approx(truth(), abs=4 * error)
    # The correction matters: without it, noise of all directions would look as if it were along the mean.
    parameter = drive(Probe(exact=True), frozenset({Need.VARIANCE, Need.DIRECTION}))
    assert parameter.grad is not None
    blurred = float((problem() - parameter.grad).square().sum(1) @ torch.tensor(SIZES).double()) / (UNITS - 1) / 61
    assert blurred > 8 * error


def test_too_little_is_known() -> None:
    assert math.isnan(spread_along(1, 8.0, 1.0, 1.0))
    assert math.isnan(variance_along(GradientStats(4, 8.0, 1.0, 0.0), 1.0))


def test_squares_of_coordinates() -> None:
    probe = Probe()
    drive(probe, frozenset({Need.VARIANCE, Need.COORDINATES}))
    expected = (torch.tensor(SIZES, dtype=torch.float64)[:, None] * problem().square()).sum(0)
    (found,) = probe.squares()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-15)
    (mean,) = probe.mean(2.0)
    torch.testing.assert_close(mean * 2 * sum(SIZES), (torch.tensor(SIZES).double()[:, None] * problem()).sum(0))


def test_a_step_that_nobody_asks_about_costs_nothing() -> None:
    probe = Probe()
    parameter = nn.Parameter(torch.zeros(5))
    probe.attach(nn.ParameterList([parameter]), [parameter], frozenset({Need.VARIANCE}))
    probe.begin(2, None)
    assert probe.active
    assert not probe.measuring
    for _ in range(2):
        probe.before(None)
        probe.before_backward()
        parameter.grad = torch.ones(5)
        probe.after_backward(4.0, 0.5)
    assert probe.numbers() == (0, 0.0)
