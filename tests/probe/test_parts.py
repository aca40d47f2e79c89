"""The gradients of one layer for all examples: every kind of convolution, little memory, every precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.probe import Example, Probe
from paceline.roles import Need
from paceline.tasks.models import MLP, LeNet

from .models import Allocations, loss_of, trainable
from .taps import Ear, batch_of, by_torch_func, expect_equal, measure


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.Conv1d(4, 6, 3), (4, 9)),
    "1d, all": (nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (4, 9)),
    "2d, stride": (nn.Conv2d(4, 6, (3, 2), stride=(2, 3), bias=False), (4, 9, 8)),
    "2d, dilation": (nn.Conv2d(4, 6, (2, 3), dilation=(3, 2), padding=(1, 2)), (4, 9, 8)),
    "2d, groups": (nn.Conv2d(4, 8, 3, groups=4, padding=1, stride=2), (4, 9, 8)),
    "2d, same": (nn.Conv2d(4, 6, (3, 4), padding="same", dilation=2), (4, 9, 8)),
    "2d, valid": (nn.Conv2d(4, 6, (3, 4), padding="valid"), (4, 9, 8)),
    "2d, circular": (nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="circular"), (4, 9, 8)),
    "2d, rows left over": (nn.Conv2d(4, 6, 2, stride=3), (4, 9, 9)),
    "3d": (nn.Conv3d(2, 4, (2, 3, 2), stride=(1, 2, 1), padding=(1, 0, 1), dilation=(2, 1, 1), groups=2), (2, 5, 6, 4)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("name", list(CONVOLUTIONS))
def test_convolutions_of_every_kind(name: str, single: bool, ear: Ear) -> None:
    layer, shape = CONVOLUTIONS[name]
    model = nn.Sequential(layer, nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(3)).double()
    batch = batch_of(*shape)
    model(batch[0])

    if single:  # an image alone, without a dimension for several
        model = nn.Sequential(layer, nn.ReLU(inplace=True)).double()
        expect_equal(nn.Sequential(model, nn.Flatten(0), nn.Unflatten(0, (1, -1))), batch, of_no_batch_of(3))
    else:
        expect_equal(model, batch)
    assert not ear.refused
    assert len(ear.heard) == (1 if single else 2)


def of_no_batch_of(classes: int) -> Callable[[Callable[..., Any], Any], Tensor]:
    def loss(model: Callable[..., Any], batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].squeeze(0))[:, :classes], batch[1])

    return loss


def test_norms_alone_form_no_gradient_of_a_linear_layer() -> None:
    model = MLP([50, 60, 3]).double()
    probe = Probe(unit=Example(loss_of))
    probe.attach(model, trainable(model), frozenset({Need.VARIANCE}))
    probe.begin(1)
    with Allocations() as seen:
        probe.before(batch_of(50))
    assert seen.largest == 8 * 50 * 60  # zeros: what else the loss has by the weight, for all examples


def test_single_precision_to_rounding() -> None:
    model = LeNet(1, 12, 3)
    inputs, labels = batch_of(1, 12, 12)
    batch = inputs.float(), labels
    expected = by_torch_func(model, loss_of, batch)
    probe = measure(model, batch, exact=True)
    # Sums of 144 products in single precision, in another order.
    torch.testing.assert_close(torch.stack(list(probe.images())), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(probe.sqnorms(), expected.double().square().sum(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(8,), (4, 8)])
def test_lower_precision_with_changes_in_place(shape: tuple[int, ...], ear: Ear) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 3))

    def loss(model: Callable[..., Any], batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch[0])
            return F.cross_entropy((out.mean(1) if out.dim() == 3 else out).float(), batch[1])

    inputs, labels = batch_of(*shape)
    batch = inputs.float(), labels
    expected = by_torch_func(model, loss, batch)
    probe = measure(model, batch, loss, exact=True)
    # Plain gradients of weights are rounded to 8 bits, ours are not.
    torch.testing.assert_close(torch.stack(list(probe.images())), expected, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(probe.sqnorms(), expected.double().square().sum(1), rtol=2**-7, atol=0)
    half = model.bfloat16()
    expected = by_torch_func(half, loss, (batch[0].bfloat16(), labels))
    probe = measure(half, (batch[0].bfloat16(), labels), loss)
    torch.testing.assert_close(probe.sqnorms(), expected.double().square().sum(1), rtol=2**-6, atol=0)
    assert ear.heard == {"0.weight", "2.weight"}


def test_inputs_are_rounded_as_the_layer_does_it() -> None:
    model = nn.Linear(64, 3)

    def loss(model: Callable[..., Any], batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = model(batch[0])
        return out.float().square().sum()

    batch = (torch.full((4, 64), 1.0038),)  # 1 in half of the bits
    expected = by_torch_func(model, loss, batch).double().square().sum(1)
    torch.testing.assert_close(measure(model, batch, loss).sqnorms(), expected, rtol=1e-6, atol=0)
