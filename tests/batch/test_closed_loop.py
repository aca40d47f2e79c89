"""Policies in a closed loop with gradients whose noise is known: where the batch settles, and how it gets there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch

from paceline import batch
from paceline.batch.adaptive import Adaptive
from paceline.batch.criteria import norm_test_batch
from paceline.probe.stats import gradient_stats
from paceline.records import Coordinates, GradientStats, Note, Plan, Progress, Round

UNITS = 8
# Coordinates of isotropic noise. One squared mean is wrong by sigma^2 / b sqrt(2 / LENGTH), which for eta = 0.9 is 30 %
# of the truth at the batch that it settles at; the mean over 100 steps, 3 %.
LENGTH = 400
SEEDS = range(4)


def a_round(stats: GradientStats, size: int, step: int) -> Round:
    note = Note(examples=size, weight=size, loss=0.0, units=stats.units)
    return Round(Plan(step, 0, (0,), (size,), size), (note,), stats)


def gradients_of(sizes: Iterator[int], noise_scale: float, seed: int = 0) -> Iterator[GradientStats]:
    """Statistics of steps of these sizes at a point with |grad F|^2 = 1 and sigma^2 = noise_scale."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.zeros(LENGTH, dtype=torch.float64)
    truth[0] = 1.0
    for size in sizes:
        # The mean of n examples with independent noise in every coordinate is one draw.
        parts = [size * (at + 1) // UNITS - size * at // UNITS for at in range(UNITS)]
        noise = torch.randn(UNITS, LENGTH, generator=generator, dtype=torch.float64)
        deviation = torch.tensor([math.sqrt(noise_scale / LENGTH / n) for n in parts], dtype=torch.float64)
        units = truth + deviation[:, None] * noise
        weights = torch.tensor(parts, dtype=torch.float64)
        mean = (weights[:, None] * units).sum(0) / size
        squares = float((weights * units.square().sum(1)).sum())
        yield gradient_stats([Note(weight=size, units=UNITS, unit_sqnorm=squares)], float(mean @ mean))


def settle(policy: Adaptive, noise_scale: float, steps: int, seed: int = 0) -> list[int]:
    sizes = []

    def present() -> Iterator[int]:
        for step in range(steps):
            sizes.append(policy.size(Progress(step)))
            yield sizes[-1]

    for step, stats in enumerate(gradients_of(present(), noise_scale, seed)):
        policy.observe(a_round(stats, sizes[-1], step))
    return sizes


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("debiased", [False, True], ids=["plain", "debiased"])
@pytest.mark.parametrize("eta", [0.9, 0.7, 0.5, 0.25])
def test_the_batch_settles_where_the_formula_says(eta: float, debiased: bool, seed: int) -> None:
    noise_scale = 1000.0
    expected = noise_scale * (1 / eta**2 - (0 if debiased else 1))
    policy = batch.NormTest(start=16, limit=10**7, eta=eta, debiased=debiased, shrink=0.98, smoothing=0.99)
    sizes = settle(policy, noise_scale, 1000, seed)
    assert sum(sizes[-400:]) / 400 == pytest.approx(expected, rel=0.1)


@pytest.mark.slow  # 30 seeds for each
@pytest.mark.parametrize("eta", [0.9, 0.7, 0.5, 0.25])
def test_if_it_only_grows_it_settles_above_that_by_the_noise_of_its_averages(eta: float) -> None:
    # A batch that cannot shrink keeps the largest that it was ever asked for.
    expected = 1000 * (1 / eta**2 - 1)
    last = []
    for seed in range(30):
        sizes = settle(batch.NormTest(start=16, limit=10**7, eta=eta, smoothing=0.99), 1000.0, 600, seed)
        assert sizes == sorted(sizes)
        last.append(sizes[-1] / expected)
    assert 1.0 <= sorted(last)[15] <= 1.25
    assert max(last) <= 2.0


@pytest.mark.parametrize(("noise_scales", "debiased"), [(0.5, False), (3.0, False), (3.0, True)])
def test_the_target_may_be_a_multiple_of_the_noise_scale(noise_scales: float, debiased: bool) -> None:
    policy = batch.NormTest(
        start=16, limit=10**7, noise_scales=noise_scales, debiased=debiased, shrink=0.98, smoothing=0.98
    )
    sizes = settle(policy, 1000.0, 600)
    assert sum(sizes[-200:]) / 200 == pytest.approx(1000 * noise_scales, rel=0.1)
    assert policy.noise_scale == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize("eta", [0.9, 0.5, 0.25])
def test_no_test_multiplies_the_batch_by_more_than_its_bound(eta: float) -> None:
    policy = batch.NormTest(start=16, limit=10**7, eta=eta, growth=math.inf, smoothing=0.9)
    sizes = settle(policy, 1e5, 200)
    assert max(sizes) > 1000
    for before, after in itertools.pairwise(sizes):
        assert after <= math.ceil(before / eta**2)
    capped = settle(batch.NormTest(start=16, limit=10**7, eta=eta, growth=1.5), 1e5, 200)
    assert all(after <= math.ceil(1.5 * before) for before, after in itertools.pairwise(capped))


def lucky(policy: Adaptive) -> list[int]:
    """Sizes of a run in which one gradient is a hundred times too short, by chance."""
    sizes = [policy.size(Progress())]
    source = gradients_of((size for size in iter(lambda: sizes[-1], -1)), 1000.0)
    for step in range(400):
        stats = next(source)
        if step == 200:
            stats = GradientStats(stats.units, stats.weight, stats.variance, stats.mean_sqnorm / 100)
        policy.observe(a_round(stats, sizes[-1], step))
        sizes.append(policy.size(Progress(step + 1)))
    return sizes


def test_one_lucky_small_gradient_does_not_inflate_the_batch_for_ever() -> None:
    published = lucky(batch.NormTest.as_published(start=16, limit=10**6, eta=0.7))
    assert published[-1] > 30 * 1000  # this is what happens without averages
    smooth = lucky(batch.NormTest(start=16, limit=10**6, eta=0.7, smoothing=0.99))
    assert smooth[-1] < 1.2 * 1000
    returning = lucky(batch.NormTest(start=16, limit=10**6, eta=0.7, smoothing=0.5, shrink=0.8))
    assert max(returning) > 1.3 * returning[-1]
    assert returning[-1] < 1.4 * 1000


def test_as_published_is_the_rule_of_one_step() -> None:
    policy = batch.NormTest.as_published(start=16, limit=10**6, eta=0.5)
    sizes = [16]
    for step, stats in enumerate(gradients_of((size for size in iter(lambda: sizes[-1], -1)), 500.0)):
        if step == 20:
            break
        policy.observe(a_round(stats, sizes[-1], step))
        asked = math.ceil(stats.variance / (0.25 * stats.mean_sqnorm))
        sizes.append(max(sizes[-1], asked))
        assert policy.size(Progress(step + 1)) == sizes[-1]


def test_a_batch_of_everything_is_exact() -> None:
    policy = batch.NormTest(start=16, limit=5000, eta=0.1, smoothing=0.9, population=5000)
    assert settle(policy, 1000.0, 100)[-1] < 5000  # 99,000 without the population
    assert settle(batch.NormTest(start=16, limit=5000, eta=0.1), 1000.0, 100)[-1] == 5000


def test_tests_are_done_every_so_many_steps() -> None:
    policy = batch.NormTest(start=16, limit=10**6, eta=0.5, every=5)
    due, sizes = [], [16]
    source = gradients_of((size for size in iter(lambda: sizes[-1], -1)), 1000.0)
    for step in range(20):
        due.append(policy.due(Progress(step)))
        stats = next(source) if due[-1] else None
        note = Note(examples=sizes[-1], weight=sizes[-1])
        policy.observe(Round(Plan(step, 0, (0,), (sizes[-1],), 16), (note,), stats))
        sizes.append(policy.size(Progress(step + 1)))
    assert due == [step % 5 == 4 for step in range(20)]
    assert [step for step in range(20) if sizes[step + 1] != sizes[step]] == [4, 9, 14, 19]


def test_a_test_that_finds_one_unit_only_is_told_once() -> None:
    policy = batch.NormTest(start=16, limit=1024, eta=0.5, every=2)
    alone, enough = GradientStats(1, 16.0, math.nan, 1.0), GradientStats(4, 16.0, 9.0, 1.0)
    for step, stats in enumerate([enough, enough, enough, alone, enough, enough]):
        policy.observe(a_round(stats, 16, step))
    assert policy.remarks() == []  # the last step of an epoch may be short
    size = policy.size(Progress())
    for step in range(9):
        policy.observe(a_round(alone, 16, 6 + step))
    assert policy.remarks() == [
        "NormTest: steps have one micro-batch of one worker, in which no noise can be seen, so that the batch stays "
        f"{size}; give a micro of at most half of the batch"
    ]
    for stats in (enough, *[alone] * 9):
        policy.observe(a_round(stats, 16, 15))
    assert policy.remarks() == []


def test_numbers_that_are_not_finite_change_nothing() -> None:
    policy = batch.NormTest(start=16, limit=1024, eta=0.5)
    policy.observe(a_round(GradientStats(4, 16.0, 9.0, 1.0), 16, 0))
    before = policy.state_dict()
    for variance, sqnorm in ((math.nan, 1.0), (1.0, math.inf), (math.inf, math.inf)):
        policy.observe(a_round(GradientStats(4, 16.0, variance, sqnorm), 16, 1))
        after = policy.state_dict()
        assert (after["size"], after["moments"]) == (before["size"], before["moments"])


@pytest.mark.parametrize("tokens", [1, 10, 1000])
def test_a_population_is_of_examples_whatever_they_weigh(tokens: int) -> None:
    policy = batch.NormTest.as_published(start=16, limit=5000, eta=0.1)
    policy.population = 5000
    note = Note(examples=16, weight=16 * tokens, units=4)
    stats = GradientStats(4, 16.0 * tokens, 800.0 * tokens, 1.0)  # of one token: as many times as noisy
    policy.observe(Round(Plan(0, 0, (0,), (16,), 16), (note,), stats))
    exact = norm_test_batch(800.0, 1.0, 0.1, 5000)
    assert policy.size(Progress(1)) == pytest.approx(exact, rel=1e-3)


def test_the_true_gradient_in_a_finite_population() -> None:
    # A mean over n of N examples without replacement has the noise sigma^2 / n (N - n) / (N - 1).
    policy = batch.NormTest(start=500, limit=1000, eta=0.9, debiased=True, population=1000, smoothing=0.9)
    for step in range(5):
        sqnorm = 1.0 + 800.0 / 500 * 500 / 999
        policy.observe(a_round(GradientStats(8, 500.0, 800.0, sqnorm), 500, step))
    assert policy.noise_scale == pytest.approx(800.0)
    inner = batch.InnerProductTest(start=500, limit=1000, theta=0.5, population=1000)
    inner.observe(a_round(GradientStats(8, 500.0, 800.0, 1.8, along=100.0), 500, 0))
    assert inner.asks_for() == pytest.approx(norm_test_batch(100.0, inner._sqnorm(), 0.5, 1000))
    augmented = batch.AugmentedTest(start=500, limit=1000, theta=0.5, nu=0.5, population=1000)
    augmented.observe(a_round(GradientStats(8, 500.0, 800.0, 1.8, along=100.0), 500, 0))
    assert augmented.asks_for() == pytest.approx(norm_test_batch(700.0, augmented._sqnorm(), 0.5, 1000))


def test_noise_along_is_no_more_than_all_of_it() -> None:
    policy = batch.InnerProductTest(start=16, limit=1000, theta=0.5)
    policy.observe(a_round(GradientStats(4, 16.0, 10.0, 1.0, along=50.0), 16, 0))
    assert policy._moments.along == 10.0


@pytest.mark.parametrize(("variance", "mean"), [(0.0, 1.0), (1.0, 0.0)])
def test_one_odd_test_of_coordinates_is_forgotten(variance: float, mean: float) -> None:
    policy = batch.CoordinateTest(start=16, limit=1000, eta=0.5, every=1, shrink=0.9)
    odd = Coordinates([torch.tensor([variance])], [torch.tensor([mean])])
    usual = Coordinates([torch.tensor([25.0])], [torch.tensor([1.0])])  # asks for 100
    for step in range(60):
        one = a_round(GradientStats(4, 16.0, 10.0, 1.0), 16, step)
        policy.observe(Round(one.plan, one.notes, one.stats, coordinates=usual if step else odd))
    assert policy.size(Progress()) == pytest.approx(100, abs=12)


def test_a_lower_limit_holds_after_a_resume() -> None:
    first = batch.NormTest.as_published(start=16, limit=1000, eta=0.5)
    first.observe(a_round(GradientStats(4, 16.0, 900.0, 1.0), 16, 0))
    second = batch.NormTest.as_published(start=16, limit=128, eta=0.5)
    second.load_state_dict(first.state_dict())
    assert (first.size(Progress()), second.size(Progress())) == (1000, 128)


def test_weights_of_tokens_become_examples() -> None:
    by_examples = batch.NormTest.as_published(start=16, limit=10**6, eta=0.5)
    by_examples.observe(a_round(GradientStats(4, 16.0, 90.0, 1.0), 16, 0))
    # The same step, whose examples have ten tokens each: variance and weight are those of tokens.
    by_tokens = batch.NormTest.as_published(start=16, limit=10**6, eta=0.5)
    note = Note(examples=16, weight=160, units=4)
    by_tokens.observe(Round(Plan(0, 0, (0,), (16,), 16), (note,), GradientStats(4, 160.0, 900.0, 1.0)))
    assert by_tokens.size(Progress(1)) == by_examples.size(Progress(1)) == 360


def test_state_is_taken_back() -> None:
    first = batch.AugmentedTest(start=16, limit=10**6, theta=0.5, nu=0.5)
    for step in range(5):
        first.observe(a_round(GradientStats(4, 16.0, 50.0 + step, 2.0, along=3.0 + step), 16, step))
    second = batch.AugmentedTest(start=16, limit=10**6, theta=0.5, nu=0.5)
    second.load_state_dict(first.state_dict())
    for policy in (first, second):
        policy.observe(a_round(GradientStats(4, 16.0, 70.0, 1.0, along=9.0), 16, 5))
    assert first.state_dict() == second.state_dict()
    assert first.size(Progress()) == second.size(Progress()) > 16


def test_growth_schedules() -> None:
    growing = batch.GrowthSchedule(start=32, factor=2, every=1000, limit=200)
    assert [growing.size(Progress(examples=e)) for e in (0, 999, 1000, 2500, 3000, 10**12)] == [
        32,
        32,
        64,
        128,
        200,
        200,
    ]
    stages = batch.GrowthSchedule.stagewise([64, 128, 256], [0.025, 0.025, 0.95], 100_000)
    assert [stages.size(Progress(examples=e)) for e in (0, 2499, 2500, 5000, 99_999)] == [64, 64, 128, 256, 256]
