from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import LoopError
from paceline.probe import Probe, SignSketch, variance_from_sums
from paceline.probe.norms import PIECE

from .models import (
    VARIANCE,
    Allocations,
    cut,
    drive,
    drive_gradients,
    expect,
    flat_gradient,
    flat_gradients,
    loss_of,
    small_batch,
    small_model,
    tensors_in,
    trainable,
)


def attached(model: nn.Module, **settings: Any) -> Probe:
    probe = Probe(**settings)
    probe.attach(model, trainable(model), VARIANCE)
    return probe


def weighted_sqnorm(weights: Tensor, gradients: Tensor) -> float:
    return float((weights * gradients.double().square().sum(1)).sum())


@pytest.mark.parametrize("sizes", [[4, 4, 4], [1, 5, 2, 4], [12]])
def test_exact_units_are_the_gradients_of_their_micro_batches(sizes: list[int]) -> None:
    model, batches = small_model(), cut(small_batch(12), sizes)
    probe = attached(model, exact=True)
    drive(probe, model, batches)
    units = flat_gradients(model, batches)
    weights = torch.tensor(sizes, dtype=torch.float64)
    assert torch.equal(probe.weights(), weights)
    torch.testing.assert_close(probe.gram(), units @ units.T)
    torch.testing.assert_close(probe.sqnorms(), units.square().sum(1))
    expect(probe, len(sizes), weighted_sqnorm(weights, units))
    mean = flat_gradient(model, small_batch(12))
    assert probe.mean_sqnorm(1.0) == pytest.approx(float(mean @ mean))


@pytest.mark.parametrize("sizes", [[1, 2, 2], [2, 3], [1] * 5, [4, 1]])
def test_the_variance_is_unbiased_for_any_grouping_of_a_models_examples(sizes: list[int]) -> None:
    # Over all orders of the same five examples the mean is exactly the variance of their gradients (ddof 1).
    model, (inputs, labels) = small_model(), small_batch(5)
    probe = attached(model, exact=True)
    estimates = []
    for order in itertools.islice(itertools.permutations(range(5)), 120):
        if any(list(part) != sorted(part) for part in cut_list(order, sizes)):
            continue  # the order within a micro-batch changes nothing
        model.zero_grad()
        drive(probe, model, cut((inputs[list(order)], labels[list(order)]), sizes))
        estimates.append(variance_from_sums(*_sums(probe, 5)))
    each = flat_gradients(model, cut((inputs, labels), [1] * 5))
    assert math.fsum(estimates) / len(estimates) == pytest.approx(float(each.var(0, correction=1).sum()), rel=1e-9)


def cut_list(order: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    ends = list(itertools.accumulate(sizes))
    return (order[end - size : end] for end, size in zip(ends, sizes, strict=True))


def _sums(probe: Probe, weight: float) -> tuple[int, float, float, float]:
    units, unit_sqnorm = probe.numbers()
    return units, weight, unit_sqnorm, probe.mean_sqnorm(1.0)


def spread_error(units: Tensor, weights: Tensor, size: int) -> float:
    """Upper bound for the standard deviation of the sketched spread: sum of those of its parts, 2 sum_c m_c^2 each."""
    mean = (weights[:, None] * units).sum(0) / weights.sum()
    residuals = units - mean
    padded = torch.cat([residuals, residuals.new_zeros(len(units), -units.shape[1] % size)], dim=1)
    masses = padded.view(len(units), -1, size).square().sum(1)
    return float((weights * (2 * masses.square().sum(1)).sqrt()).sum())


def test_sketched_sums_agree_with_exact_ones_within_the_theoretical_error() -> None:
    # Four standard deviations, of a bound that is itself generous.
    model, sizes = small_model(), [3, 5, 4, 8]
    batches = cut(small_batch(20), sizes)
    weights = torch.tensor(sizes, dtype=torch.float64)
    units = flat_gradients(model, batches)
    for seed in range(10):
        probe = attached(model, size=29, seed=seed)
        model.zero_grad()
        drive(probe, model, batches)
        found = probe.numbers()[1]
        assert abs(found - weighted_sqnorm(weights, units)) < 4 * spread_error(units, weights, 29)


def test_sketched_sums_are_unbiased_whatever_the_factors() -> None:
    # 200 seeds, 4.5 standard errors; the standard deviation is the sample's own.
    generator = torch.Generator().manual_seed(0)
    units = torch.randn(4, 60, generator=generator, dtype=torch.float64) + 0.5
    weights, factors = [1.0, 2.0, 6.0, 3.0], [0.3, 1.0, 0.2, 2.0]  # not in proportion
    parameter = nn.Parameter(torch.zeros(60, dtype=torch.float64))
    found = []
    for seed in range(200):
        probe = Probe(size=11, seed=seed)
        probe.attach(nn.Module(), [parameter], VARIANCE)
        parameter.grad = None
        drive_gradients(probe, parameter, units, weights, factors)
        found.append(probe.numbers()[1])
    values = torch.tensor(found, dtype=torch.float64)
    expected = weighted_sqnorm(torch.tensor(weights, dtype=torch.float64), units)
    assert abs(float(values.mean()) - expected) < 4.5 * float(values.std()) / math.sqrt(200)


def test_a_strong_mean_gradient_does_not_drown_the_variance() -> None:
    # The mean has 10^4 times the squared norm of the spread. From sketched norms alone the variance would be off
    # by sqrt(2 / 101) * 10^4, a thousandfold; the sum is known exactly, so sqrt(2 / 101) = 14 % remain.
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(8, 5000, generator=generator)
    mean = 100 * torch.randn(5000, generator=generator)
    weights = [float(w) for w in (4, 4, 4, 4, 4, 4, 4, 1)]
    parameter = nn.Parameter(torch.zeros(5000))
    exact, sketched = Probe(exact=True), Probe(size=101)
    estimates = []
    for probe in (exact, sketched):
        probe.attach(nn.Module(), [parameter], VARIANCE)
        parameter.grad = None
        drive_gradients(probe, parameter, mean + spread, weights, [w / 29 for w in weights])
        estimates.append(variance_from_sums(*_sums(probe, 29)))
    assert estimates[0] == pytest.approx(5000 * 29 / 8, rel=0.2)
    assert estimates[1] == pytest.approx(estimates[0], rel=0.5)
    plain = float((sketched.weights() * sketched.sqnorms()).sum())
    assert abs(variance_from_sums(8, 29, plain, sketched.mean_sqnorm(1.0)) / estimates[0] - 1) > 10


def test_gram_from_sketches_is_near_the_exact_one() -> None:
    model, batches = small_model(), cut(small_batch(16), [4, 2, 6, 4])
    units = flat_gradients(model, batches)
    probe = attached(model, keep=True, size=53)
    drive(probe, model, batches)
    torch.testing.assert_close(probe.gram().diagonal(), probe.sqnorms())
    sketch = SignSketch(units.shape[1], 53, dtype=torch.float64)
    images = torch.stack([sketch.of([unit], [0]) for unit in units])
    torch.testing.assert_close(probe.gram(), images @ images.T)
    lengths = units.norm(dim=1)
    # |<a, b>| is off by at most about sqrt(2 / 53) = 20 % of |a| |b|; four times that.
    assert ((probe.gram() - units @ units.T).abs() < 0.8 * torch.outer(lengths, lengths)).all()


def test_gram_without_sketches_says_what_to_write() -> None:
    model = small_model()
    probe = attached(model)
    drive(probe, model, cut(small_batch(4), [2, 2]))
    with pytest.raises(LoopError, match=r"Probe\(keep=True\)"):
        probe.gram()


@pytest.mark.parametrize("settings", [{}, {"keep": True}, {"exact": True}])
@pytest.mark.parametrize("sizes", [[6], [2, 1, 3]])
def test_an_amp_scale_changes_nothing(settings: dict[str, bool], sizes: list[int]) -> None:
    model, batches = small_model(dtype=torch.float32), cut(small_batch(6, dtype=torch.float32), sizes)
    results = []
    for scale in (1.0, 65536.0):
        probe = attached(model, **settings)
        model.zero_grad()
        drive(probe, model, batches, amp_scale=scale)
        gram = probe.gram().tolist() if settings else []
        results.append((probe.numbers(), probe.sqnorms().tolist(), gram, probe.mean_sqnorm(scale)))
    assert results[0] == results[1]  # a power of two: not one bit differs


@pytest.mark.parametrize("settings", [{"size": 7}, {"exact": True}])
@pytest.mark.parametrize("start", ["none", "zeros", "earlier"])
@pytest.mark.parametrize("sizes", [[6], [2, 1, 3]])
def test_what_grad_holds_before_the_step_is_not_counted(settings: dict[str, int], start: str, sizes: list[int]) -> None:
    model, batches = small_model(), cut(small_batch(6), sizes)
    probe = attached(model, keep=True, **settings)
    model.zero_grad()
    drive(probe, model, batches)
    expected = probe.gram()
    if start == "none":
        model.zero_grad()
    elif start == "zeros":
        model.zero_grad(set_to_none=False)
    drive(probe, model, batches)
    torch.testing.assert_close(probe.gram(), expected)


def test_an_earlier_gradient_is_not_taken_for_the_sum_of_the_units() -> None:
    # It would bring its own, larger error into the correction; so there is none.
    model, batches = small_model(), cut(small_batch(6), [2, 1, 3])
    probe = attached(model, size=7)
    drive(probe, model, batches)
    sketched = float((probe.weights() * probe.sqnorms()).sum())
    assert probe.numbers()[1] != pytest.approx(sketched, rel=1e-3)
    drive(probe, model, batches)
    expect(probe, 3, sketched)


def test_one_micro_batch_on_top_of_an_earlier_gradient_is_sketched() -> None:
    model, batches = small_model(), cut(small_batch(6), [6])
    probe = attached(model, size=4093)
    drive(probe, model, batches)
    exact = probe.numbers()[1]
    drive(probe, model, batches)
    # 87 parameters in 4093 buckets: none is shared, so the sketch keeps the norm.
    expect(probe, 1, exact)


def test_a_single_micro_batch_is_measured_exactly_without_a_sketch() -> None:
    # With one bucket a sketch would be far off.
    model, batch = small_model(), small_batch(6)
    probe = attached(model, size=1)
    for zero in (None, True, False):
        if zero is not None:
            model.zero_grad(set_to_none=zero)
        drive(probe, model, [batch])
        gradient = flat_gradient(model, batch)
        expect(probe, 1, 6 * float(gradient @ gradient))
        assert probe.sqnorms().tolist() == [pytest.approx(float(gradient @ gradient))]


def test_parameters_without_a_gradient_count_as_zero() -> None:
    model = small_model()
    unused = nn.Parameter(torch.ones(500, dtype=torch.float64))
    parameters = [trainable(model)[0], unused, *trainable(model)[1:]]
    batches = cut(small_batch(6), [2, 4])
    units = flat_gradients(model, batches)
    probe = Probe(exact=True)
    probe.attach(model, parameters, VARIANCE)
    drive(probe, model, batches)
    torch.testing.assert_close(probe.gram(), units @ units.T)
    sketched = Probe(size=4093)
    sketched.attach(model, parameters, VARIANCE)
    model.zero_grad()
    drive(sketched, model, batches)
    # 587 parameters in 4093 buckets: exact again.
    expect(sketched, 2, probe.numbers()[1])


def test_a_step_without_any_gradient_is_all_zero() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    other = nn.Parameter(torch.ones(1))
    probe = Probe(always=True)
    probe.attach(nn.Module(), parameters, frozenset())
    drive_gradients(probe, other, torch.ones(2, 1), [1.0, 1.0], [0.5, 0.5])
    assert probe.numbers() == (2, 0.0)
    assert probe.mean_sqnorm(1.0) == 0.0


def test_a_micro_batch_without_weight_is_no_unit() -> None:
    units = torch.tensor([[3.0, 4.0], [7.0, 7.0], [0.0, 1.0]])
    parameter = nn.Parameter(torch.zeros(2))
    for factors in ([2.0, 0.0, 1.0], [2.0, 5.0, 1.0]):
        for exact in (True, False):
            probe = Probe(exact=exact)
            probe.attach(nn.Module(), [parameter], VARIANCE)
            parameter.grad = None
            drive_gradients(probe, parameter, units, [2.0, 0.0, 1.0], factors)
            expect(probe, 2, 2 * 25 + 1)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("settings", [{}, {"exact": True}, {"keep": True}])
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_not_finite_shows_and_is_gone_in_the_next_step(
    bad: float, settings: dict[str, bool], count: int
) -> None:
    parameter = nn.Parameter(torch.zeros(4))
    probe = Probe(**settings)  # type: ignore[arg-type]
    probe.attach(nn.Module(), [parameter], VARIANCE)
    units = torch.ones(count, 4)
    units[0, 1] = bad
    drive_gradients(probe, parameter, units, [1.0] * count, [1.0] * count)
    assert not math.isfinite(probe.numbers()[1])
    assert not math.isfinite(probe.mean_sqnorm(1.0))
    parameter.grad = None
    drive_gradients(probe, parameter, torch.ones(count, 4), [1.0] * count, [1.0] * count)
    expect(probe, count, 4.0 * count)


@pytest.mark.parametrize("settings", [{"size": 13}, {"exact": True}, {"size": 13, "keep": True}])
@pytest.mark.parametrize("sizes", [[8], [2, 5, 1]])
@pytest.mark.parametrize("hidden", [0, 1])
def test_buckets_are_used_in_the_place_of_reduced_gradients(
    settings: dict[str, int], sizes: list[int], hidden: int
) -> None:
    # In the last backward pass two buckets show the gradients, in reverse order as DDP does, and a foreign
    # parameter; then .grad is overwritten by the "reduction". `hidden` parameters are not DDP's: they keep .grad.
    model, batches = small_model(), cut(small_batch(8), sizes)
    plain = attached(model, **settings)
    drive(plain, model, batches)
    expected, gram = plain.numbers(), plain.gram() if len(settings) > 1 or "exact" in settings else None

    probe = attached(model, **settings)
    foreign = nn.Parameter(torch.ones(3))

    def reduce(last: bool) -> None:
        if not last:
            return
        shown = list(reversed(trainable(model)[hidden:]))
        for bucket in (shown[:1], shown[1:]):
            flat = [parameter.grad.clone() for parameter in bucket if parameter.grad is not None]
            probe.see_bucket([*bucket, foreign], [*flat, torch.full((3,), 1e6)])
            for gradient in flat:
                gradient.fill_(777.0)  # a hook changes its buffer afterwards
            for parameter in bucket:
                parameter.grad = torch.randn_like(parameter)

    for _ in range(2):
        model.zero_grad()
        drive(probe, model, batches, during_backward=reduce)
        expect(probe, expected[0], expected[1])
        if gram is not None:
            torch.testing.assert_close(probe.gram(), gram)


@pytest.mark.parametrize("sizes", [[8], [2, 5, 1]])
@pytest.mark.parametrize("as_view", [False, True])
def test_the_hook_of_a_real_ddp_module(sizes: list[int], as_view: bool, tmp_path: Path) -> None:
    model, batches = small_model(), cut(small_batch(8), sizes)
    plain = attached(model, exact=True)
    drive(plain, model, batches)
    model.zero_grad()

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5, gradient_as_bucket_view=as_view)
        probe = attached(model, exact=True)

        # Without annotations: DDP compares them with classes, but here they are strings.
        def hook(state, bucket):  # type: ignore[no-untyped-def]
            probe.see_bucket(bucket.parameters(), bucket.gradients())
            bucket.buffer().fill_(3.0)  # what the others' gradients would do to it
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        ddp.register_comm_hook(None, hook)
        for _ in range(3):  # DDP rebuilds its buckets after the first
            model.zero_grad()
            probe.begin(len(batches))
            for number, batch in enumerate(batches):
                ddp.require_backward_grad_sync = number == len(batches) - 1
                share = len(batch[0]) / 8
                loss = loss_of(ddp, batch) * share
                probe.before_backward()
                torch.autograd.backward(loss)
                probe.after_backward(len(batch[0]), share)
            torch.testing.assert_close(probe.gram(), plain.gram())
            assert probe.numbers()[1] == pytest.approx(plain.numbers()[1])
            assert all((p.grad == 3.0).all() for p in trainable(model) if p.grad is not None)
    finally:
        dist.destroy_process_group()


def test_more_backward_passes_than_micro_batches_are_refused() -> None:
    model, batches = small_model(), cut(small_batch(4), [2, 2])
    probe = attached(model)
    drive(probe, model, batches)
    with pytest.raises(LoopError, match="more than 2 times"):
        probe.before_backward()


@given_settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 99), st.sampled_from([1, 7, 4093]))
def test_workers_sums_pool_to_the_exact_variance_up_to_the_sketch(sizes: list[int], seed: int, size: int) -> None:
    """Two workers; the sum is never off by more than the sketch can be, and not at all with one unit each."""
    model, batch = small_model(seed), small_batch(sum(sizes), seed)
    batches = cut(batch, sizes)
    units = flat_gradients(model, batches)
    weights = torch.tensor(sizes, dtype=torch.float64)
    total, count = 0.0, 0
    bound = 1e-9
    for own in (slice(0, len(sizes) // 2), slice(len(sizes) // 2, None)):
        if not batches[own]:
            continue
        probe = attached(model, size=size, seed=seed)
        model.zero_grad()
        drive(probe, model, batches[own])
        units_seen, unit_sqnorm = probe.numbers()
        count, total = count + units_seen, total + unit_sqnorm
        # ||S x||^2 <= (rows) ||x||^2 for any signs, and the spread is what is sketched.
        mean = (weights[own][:, None] * units[own]).sum(0) / weights[own].sum()
        rows = -(-units.shape[1] // size)
        bound += rows * weighted_sqnorm(weights[own], units[own] - mean)
    assert count == len(sizes)
    assert abs(total - weighted_sqnorm(weights, units)) <= bound
    if len(sizes) <= 2:
        assert total == pytest.approx(weighted_sqnorm(weights, units))


@pytest.mark.parametrize("keep", [False, True])
def test_memory_does_not_grow_with_the_model(keep: bool) -> None:
    size, length, units = 101, 1_000_000, 5
    parameters = [nn.Parameter(torch.zeros(length // 2)), nn.Parameter(torch.zeros(500, length // 1000))]
    probe = Probe(size=size, keep=keep)
    probe.attach(nn.Module(), parameters, VARIANCE)
    seen = Allocations()

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        probe.begin(units)
        for number in range(units):
            with seen:
                probe.before_backward()
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 1.0 + number)
            with seen:
                probe.after_backward(1.0, 1.0)

    step()
    step()
    probe.numbers()
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(probe)) / 4
    sketch = 67 * size + 2 * length / size
    assert held <= sketch + size + (units * size if keep else 0) + 4 * units + 10
    assert 0 < seen.largest <= 4 * max(64 * size, PIECE) < 4 * length / 4
