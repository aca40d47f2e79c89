"""Corners in which a model lost its parameters, its memory or its numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.probe import one_by_one

from .models import loss_of
from .taps import CLOSE, Ways, batch_of, by_torch_func, expect_equal, measure


def test_one_module_with_two_names_keeps_its_parameters_and_learns() -> None:
    torch.manual_seed(0)
    block = nn.Linear(5, 5)
    model = nn.Sequential(*[block] * 3, nn.Linear(5, 3)).double()
    before, batch = dict(model.named_parameters()), batch_of(5)
    probe = measure(model, batch, exact=True)
    assert all(now is before[name] for name, now in model.named_parameters())
    expected = by_torch_func(copy.deepcopy(model), loss_of, batch)
    torch.testing.assert_close(torch.stack(list(probe.images())), expected, **CLOSE)
    loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
    assert block.weight.grad is not None


class Shown:
    """How many examples each pass had, the first to learn left out."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.lengths: list[int] = []
        parts = one_by_one.OneByOne._parts

        def note(every: one_by_one.OneByOne, chunk: Any, layers: Any) -> Any:
            self.lengths.append(chunk.length)
            return parts(every, chunk, layers)

        patch.setattr(one_by_one.OneByOne, "_parts", note)


def test_a_weight_that_is_used_in_another_way_is_formed_for_few_examples_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Ways(lambda ways, x: ways.second(F.linear(x, ways.first.weight, ways.first.bias))).double()
    shown = Shown(monkeypatch)
    measure(model, batch_of(5), chunk_size=2)
    assert shown.lengths == [2, 2, 2, 2]  # two to learn from, then six
    shown.lengths.clear()
    measure(Ways(lambda ways, x: ways.second(ways.first(x))).double(), batch_of(5), chunk_size=2)
    assert shown.lengths == [2, 6]


@pytest.mark.parametrize("said", [{"stride": 2}, {"dilation": 2}, {"padding": 1}, {"padding": (1,), "stride": 1}])
def test_convolutions_whose_settings_were_changed(said: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3)
    for name, value in said.items():
        setattr(layer, name, value)
    expect_equal(nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten()).double(), batch_of(2, 7, 7))


def test_a_convolution_without_images() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, 3, 3), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(x) + self.conv(x.new_zeros(0, 2, 6, 6)).sum()
            return out

    torch.manual_seed(0)
    expect_equal(Empty().double(), batch_of(5))


def test_what_was_found_is_not_rounded_by_autocast() -> None:
    torch.manual_seed(0)
    model, (inputs, targets) = nn.Sequential(nn.Linear(5, 4), nn.Flatten(), nn.Linear(12, 3)), batch_of(3, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        probe = measure(model, (inputs.float(), targets), exact=True)
    images = torch.stack(list(probe.images())).double()
    torch.testing.assert_close(probe.sqnorms(), images.square().sum(1), rtol=1e-5, atol=0)


def test_a_copy_that_is_made_meanwhile_is_a_model_of_its_own() -> None:
    layer = nn.Linear(5, 3)
    copies: list[nn.Module] = []
    model = nn.Sequential(layer).double()

    def loss(called: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        copies.append(copy.deepcopy(model))
        return loss_of(called, batch)

    measure(model, batch_of(5), loss)
    with torch.no_grad():
        inputs = batch_of(5)[0]
        before = copies[0](inputs)
        layer.weight.zero_()
        assert torch.equal(copies[0](inputs), before)
