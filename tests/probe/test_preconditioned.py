"""Images of gradients times factors: for an order alone, beside the statistics of gradients as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import LoopError
from paceline.probe import Example, MicroBatch, Probe, SignSketch
from paceline.roles import Need
from paceline.tasks.models import LeNet

from .models import Batch, cut, drive, flat_gradient, flat_gradients, loss_of, small_batch, small_model, trainable
from .taps import batch_of, by_torch_func

UNITS = frozenset({Need.UNITS})
BOTH = frozenset({Need.UNITS, Need.VARIANCE})
SIZES = [4, 1, 3]

# Double precision: sums of a few thousand products, in another order.
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}


def factors_for(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {each: torch.rand(each.shape, generator=generator, dtype=each.dtype) * 50 for each in trainable(model)}


def flat(factors: dict[nn.Parameter, Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in factors.values()])


def attached(model: nn.Module, needs: frozenset[Need] = UNITS, **settings: Any) -> Probe:
    probe = Probe(**settings)
    probe.attach(model, trainable(model), needs)
    return probe


def sketched(rows: Tensor, size: int) -> Tensor:
    return torch.stack([SignSketch(len(row), size, dtype=row.dtype).of([row], [0]) for row in rows])


def batches() -> list[Batch]:
    return cut(small_batch(sum(SIZES)), SIZES)


@pytest.mark.parametrize("needs", [UNITS, BOTH])
@pytest.mark.parametrize("before", [0.0, 2.0])
def test_sketches_of_micro_batches_are_those_of_the_scaled_gradients(needs: frozenset[Need], before: float) -> None:
    """Also where ``.grad`` was not empty, and with a loss scale."""
    model = small_model()
    factors = factors_for(model)
    probe = attached(model, needs, size=17)
    probe.precondition(factors)
    for each in trainable(model):
        each.grad = torch.full_like(each, before)
    drive(probe, model, batches(), amp_scale=64.0, needs=needs)
    expected = sketched(flat_gradients(model, batches()) * flat(factors), 17)
    torch.testing.assert_close(torch.stack(probe.order_images()), expected, **CLOSE)


def test_whole_gradients_are_scaled_and_grad_is_left_alone() -> None:
    model = small_model()
    factors = factors_for(model)
    probe = attached(model, exact=True)
    probe.precondition(factors)
    drive(probe, model, batches(), needs=UNITS)
    units = flat_gradients(model, batches())
    torch.testing.assert_close(torch.stack(probe.order_images()), units * flat(factors), **CLOSE)
    torch.testing.assert_close(torch.stack(probe.images()), units, **CLOSE)
    mean = torch.cat([each.grad.reshape(-1) for each in trainable(model) if each.grad is not None])
    torch.testing.assert_close(mean, flat_gradient(model, small_batch(sum(SIZES))), **CLOSE)


@pytest.mark.parametrize("unit", [MicroBatch(), Example(loss_of)])
def test_statistics_are_those_of_gradients_as_they_are(unit: Any) -> None:
    model, found = small_model(), []
    for factors in (None, factors_for(model)):
        model.zero_grad()
        probe = attached(model, BOTH, unit=unit)
        probe.precondition(factors)
        drive(probe, model, batches())
        found.append((probe.numbers(), probe.sqnorms().tolist(), torch.stack(probe.order_images())))
    assert found[0][:2] == found[1][:2]
    assert not torch.allclose(found[0][2], found[1][2])


@pytest.mark.parametrize("exact", [False, True])
def test_sketches_of_single_examples_are_those_of_the_scaled_gradients(exact: bool) -> None:
    """Of linear and convolution layers, of which no gradient is formed otherwise, and of all others."""
    model = nn.Sequential(LeNet(1, 12, 3), nn.LayerNorm(3)).double()
    batch = batch_of(1, 12, 12)
    factors = factors_for(model)
    settings: dict[str, Any] = {"exact": True} if exact else {"size": 97}
    probe = attached(model, unit=Example(loss_of), **settings)
    probe.precondition(factors)
    probe.begin(1, UNITS)
    probe.before(batch)
    expected = by_torch_func(model, loss_of, batch) * flat(factors)
    found = torch.stack(probe.order_images())
    torch.testing.assert_close(found, expected if exact else sketched(expected, 97), **CLOSE)


def test_a_parameter_without_factors_counts_as_zero() -> None:
    model = small_model()
    first, *others = trainable(model)
    for unit in (MicroBatch(), Example(loss_of)):
        model.zero_grad()
        probe = attached(model, exact=True, unit=unit)
        probe.precondition({each: torch.ones_like(each) for each in others})
        drive(probe, model, batches())
        found = torch.stack(probe.order_images())
        assert not found[:, : first.numel()].any()
        assert found[:, first.numel() :].all(0).any()


def test_without_factors_an_order_sees_gradients_again() -> None:
    model = small_model()
    probe = attached(model, size=17)
    for factors in (None, factors_for(model), None):
        model.zero_grad()
        probe.precondition(factors)
        drive(probe, model, batches())
    expected = sketched(flat_gradients(model, batches()), 17)
    torch.testing.assert_close(torch.stack(probe.order_images()), expected, **CLOSE)


def test_an_order_alone_takes_no_other_images() -> None:
    model = small_model()
    probe = attached(model, size=17)
    probe.precondition(factors_for(model))
    drive(probe, model, batches(), needs=UNITS)
    assert len(probe.order_images()) == len(SIZES)
    assert probe.weights().tolist() == SIZES
    with pytest.raises(LoopError, match="only their norms were kept"):
        probe.images()
