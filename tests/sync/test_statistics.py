"""The sum of sketches that rides with an average: what everybody can tell from it about the gradients of all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.probe.sketch import SignSketch
from paceline.records import GradientStats, Note
from paceline.sync.notes import Numbers
from paceline.sync.statistics import GradientSum, Measured

LENGTH, SIZE = 5000, 127
WEIGHTS = [8.0, 24.0, 0.0, 16.0]


def gradients(signal: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(LENGTH, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(WEIGHTS), LENGTH, generator=generator, dtype=torch.float64)
    return signal * truth + noise


def summed(vectors: Tensor, seed: int | None, dtype: type) -> GradientStats:
    """As the workers do it: each writes, the numbers are added, each reads."""
    sketch = SignSketch(LENGTH, SIZE, seed or 0, dtype=torch.float64)
    riders = []
    total = np.zeros(0)
    for weight, vector in zip(WEIGHTS, vectors, strict=True):
        image = vector if seed is None else sketch.of([vector], [0])
        rider = GradientSum(len(image))
        rider.own = Measured(weight, image, float(vector @ vector)) if weight else None
        out: Numbers = np.empty(rider.numel, dtype=dtype)
        rider.write(out)
        total = out if not len(total) else total + out
        riders.append(rider)
    notes = [
        Note(weight=99.0, units=1.0 if weight else 0.0, unit_sqnorm=weight * float(vector @ vector))
        for weight, vector in zip(WEIGHTS, vectors, strict=True)
    ]
    found = []
    for rider in riders:
        rider.read(total)
        found.append(rider.stats(notes))
    assert all(each == found[0] for each in found)
    assert found[0] is not None
    return found[0]


def truth(vectors: Tensor) -> tuple[float, float]:
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    mean = (weights[:, None] * vectors).sum(0) / weights.sum()
    return float((weights * (vectors - mean).square().sum(1)).sum()) / 2, float(mean @ mean)


@pytest.mark.parametrize("signal", [0.0, 1.0, 30.0])
def test_with_whole_gradients_it_is_exact(signal: float) -> None:
    vectors = gradients(signal)
    variance, sqnorm = truth(vectors)
    found = summed(vectors, None, np.float64)
    assert (found.units, found.weight) == (3, 48.0)
    assert found.variance == pytest.approx(variance, rel=1e-9)
    assert found.mean_sqnorm == pytest.approx(sqnorm, rel=1e-9)


@pytest.mark.parametrize("signal", [0.0, 30.0])
def test_with_sketches_it_is_right_on_average_however_strong_the_mean_is(signal: float) -> None:
    vectors = gradients(signal)
    variance, sqnorm = truth(vectors)
    found = [summed(vectors, seed, np.float64) for seed in range(200)]
    variances = torch.tensor([each.variance for each in found])
    sqnorms = torch.tensor([each.mean_sqnorm for each in found])
    # The error of one sketch is sqrt(2 / 127) = 13 % of the spread, even if the mean is 900 times as large.
    assert float(variances.std()) < 0.2 * variance
    assert float(variances.mean()) == pytest.approx(variance, abs=4 * float(variances.std()) / 200**0.5)
    assert float(sqnorms.mean()) == pytest.approx(sqnorm, abs=4 * float(sqnorms.std()) / 200**0.5)


def test_single_precision_is_enough() -> None:
    vectors = gradients(3.0)
    wide, narrow = summed(vectors, 1, np.float64), summed(vectors, 1, np.float32)
    # The sum of sketches has 24 bits: 1e-7 of a mean that is ten times the spread.
    assert narrow.variance == pytest.approx(wide.variance, rel=1e-4)
    assert narrow.mean_sqnorm == pytest.approx(wide.mean_sqnorm, rel=1e-6)


def test_nobody_has_measured() -> None:
    rider = GradientSum(4)
    out = np.empty(rider.numel)
    rider.write(out)
    assert not out.any()
    rider.read(out)
    assert rider.stats([Note()]) is None
