"""Drift: the distance of the workers' models from their average, estimated from sketches that ride along."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import paceline as pl
from paceline import codec, sync
from paceline.roles import Codec
from paceline.sync.drift import SIZE, Drift
from tests.laws.test_local_sgd import Skewed
from tests.pool import Pool
from tests.problems import data, flat, train


def exact(models: Sequence[Tensor], weights: Sequence[float]) -> float:
    """sum_i p_i |x_i - sum_j p_j x_j|^2."""
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    stack = torch.stack([model.double() for model in models])
    return float(shares @ (stack - shares @ stack).square().sum(1))


def spread(models: Sequence[Tensor], weights: Sequence[float]) -> float:
    """A bound on the standard deviation of the estimate of that.

    For one vector g it is sqrt(2 sum_c m_c^2) with m_c the square sum of the numbers in bucket c, which is about
    sqrt(2 / 251) |g|^2; that of a sum is at most the sum of those of its terms.
    """
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    stack = torch.stack([model.double() for model in models])
    total = 0.0
    for share, apart in zip(shares, stack - shares @ stack, strict=True):
        padded = torch.zeros(-(-apart.numel() // SIZE) * SIZE, dtype=torch.float64)
        padded[: apart.numel()] = apart
        total += float(share * (2 * padded.view(-1, SIZE).square().sum(0).square().sum()).sqrt())
    return total


def estimated(
    models: Sequence[Tensor], weights: Sequence[float], scales: Sequence[float] | None = None, seed: int = 0
) -> list[float]:
    """What each worker reads from the sum of what all have written."""
    workers = []
    table = np.zeros(len(models) * (SIZE + 2))
    for rank, model in enumerate(models):
        one = Drift(rank, len(models), seed)
        one.weight, one.scale = weights[rank], scales[rank] if scales else 1.0
        flats = [model[:100] * one.scale, model[100:] * one.scale]
        rest = len(model) - 100
        one.lay_out(flats, [[100], [rest // 3, rest - rest // 3]])
        numbers = np.empty(one.numel)
        one.write(numbers)
        table += numbers
        workers.append(one)
    for one in workers:
        one.read(table)
    return [one.distance.value for one in workers]


def models_apart(count: int, numel: int, seed: int) -> list[Tensor]:
    """Around a common centre, as after a round."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(numel, generator=generator)
    return [centre + 0.1 * torch.randn(numel, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("weights", [[1.0, 1.0], [2.0, 4.0, 6.0], [0.0, 3.0, 1.0, 2.0]])
def test_the_estimate_is_within_sampling_error(weights: list[float], seed: int) -> None:
    """Five standard deviations; random signs make the estimate nearly normal, which is beyond that once in a million.

    A worker of weight zero counts nothing.
    """
    models = models_apart(len(weights), 5000, seed)
    distances = estimated(models, weights)
    assert len(set(distances)) == 1
    assert abs(distances[0] ** 2 - exact(models, weights)) <= 5 * spread(models, weights)
    assert spread(models, weights) < 0.1 * exact(models, weights)  # about sqrt(2 / 251) = 9 %: the bound says something


def test_short_vectors_are_exact() -> None:
    """With one number in a bucket a sign is all that happens to it; sketches have single precision."""
    models, weights = models_apart(3, SIZE, 0), [1.0, 2.0, 5.0]
    assert math.isclose(estimated(models, weights)[0], math.sqrt(exact(models, weights)), rel_tol=1e-5)


def test_what_tensors_were_multiplied_by_does_not_matter() -> None:
    models, weights = models_apart(3, 5000, 1), [1.0, 2.0, 5.0]
    plain, scaled = estimated(models, weights)[0], estimated(models, weights, [0.1, 0.3, 7.0])[0]
    # Rounding in single precision of sketches of norm |x| ~ 70, against a distance of 7.
    assert math.isclose(plain, scaled, rel_tol=1e-5)


@pytest.mark.parametrize("scales", [None, [0.1, 0.3, 7.0]], ids=["as they are", "scaled"])
def test_equal_models_have_no_drift(scales: list[float] | None) -> None:
    """To the single precision of sketches of |x| ~ 70."""
    models = models_apart(1, 5000, 2) * 3
    assert estimated(models, [1.0, 2.0, 5.0], scales)[0] <= 1e-6 * float(models[0].norm())


def test_nobody_has_done_anything() -> None:
    assert estimated(models_apart(3, 5000, 3), [0.0, 0.0, 0.0]) == [0.0] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_any_precision(dtype: torch.dtype) -> None:
    models = [model.to(dtype) for model in models_apart(2, 5000, 6)]
    assert abs(estimated(models, [1.0, 1.0])[0] ** 2 - exact(models, [1.0, 1.0])) <= 5 * spread(models, [1.0, 1.0])


def test_a_small_tensor_that_moves_alone_is_seen() -> None:
    """16 numbers in a million: a sample of all numbers alike would see none of them."""
    models = [torch.zeros(1_000_000) for _ in range(2)]
    models[0][:100] = torch.randn(100, generator=torch.Generator().manual_seed(0))
    square = estimated(models, [1.0, 1.0])[0] ** 2
    # 16 of 100 squares, drawn in 4 places: their mean is right to sqrt(2 / 4) at worst, and five times that is allowed.
    assert 0 < square < (1 + 5 * math.sqrt(0.5)) * exact(models, [1.0, 1.0])


def test_complex_numbers_count_with_both_parts() -> None:
    real, imaginary = models_apart(2, 200, 7), models_apart(2, 200, 8)
    models = [torch.complex(one, other) for one, other in zip(real, imaginary, strict=True)]
    both = [torch.view_as_real(model).flatten() for model in models]
    assert abs(estimated(models, [1.0, 3.0])[0] ** 2 - exact(both, [1.0, 3.0])) <= 5 * spread(both, [1.0, 3.0])


def test_a_model_that_is_not_finite_is_infinitely_far() -> None:
    models = models_apart(3, 1000, 4)  # so few are all looked at
    models[1][17] = math.inf
    with np.errstate(invalid="ignore"):
        assert estimated(models, [1.0, 1.0, 1.0])[0] == math.inf


def test_the_estimate_is_unbiased() -> None:
    """The mean over many sketches is five times as near as one of their standard deviations over the root of draws.

    The models differ mostly in parallel rows, which a sketch with one sign for each column would add up.
    """
    draws, weights = 400, [1.0, 2.0, 5.0]
    models = [model + 0.1 * rank * torch.ones(2000) for rank, model in enumerate(models_apart(3, 2000, 5))]
    squares = [estimated(models, weights, seed=seed)[0] ** 2 for seed in range(draws)]
    assert abs(np.mean(squares) - exact(models, weights)) <= 5 * spread(models, weights) / math.sqrt(draws)
    # And the bound on the standard deviation is one: with 400 draws its estimate is right to 4 %.
    assert np.std(squares) <= 1.15 * spread(models, weights)


Seen = list[tuple[Tensor, int, float]]


def drifts(hidden: int, one: Codec | None, overlap: int) -> Seen:
    """For each round: a worker's parameters when it ended, the examples that it had used, the drift in the record."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3))
    optimizer = SGD(model.parameters(), lr=0.2)
    own: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: own.append(flat(model)))  # before the run's, which averages
    used: list[int] = []
    told: list[float] = []
    role = sync.LocalSGD(4, codec=one, overlap=overlap)
    with pl.Run(model, optimizer, data(61), batch=12, balance=Skewed(), sync=role, deadline=10.0) as run:

        def look(step: pl.Step) -> None:
            used.append(step.plan.counts[run.fleet.rank])
            if step.round is not None:
                assert step.round.drift is not None
                told.append(step.round.drift)

        train(run, model, each=look, steps=12)
    return [(own[at], sum(used[at - 3 : at + 1]), drift) for at, drift in zip([3, 7, 11], told, strict=True)]


@pytest.mark.parametrize("hidden", [8, 200])
@pytest.mark.parametrize(
    ("one", "overlap"), [(None, 0), (None, 1), (codec.Uniform8(), 0)], ids=["plain", "overlap", "uniform8"]
)
def test_the_record_shows_the_drift_of_each_round(pool: Pool, hidden: int, one: Codec | None, overlap: int) -> None:
    """With 8 hidden units the model is as short as a sketch, so that it is exact; with 200 it has 2003 numbers."""
    found = pool.run(3, drifts, hidden, one, overlap)
    for each in zip(*found, strict=True):
        models, weights = [model for model, _, _ in each], [float(used) for _, used, _ in each]
        assert len({drift for _, _, drift in each}) == 1
        drift, square = each[0][2], exact(models, weights)
        if hidden == 8:
            # Single precision of sketches of |x| ~ 3, against a distance of 0.1.
            assert math.isclose(drift, math.sqrt(square), rel_tol=1e-4)
        else:
            assert abs(drift**2 - square) <= 5 * spread(models, weights)
