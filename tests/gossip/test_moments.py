"""Momentum that is averaged: laid out before it exists, and the same as torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from paceline.errors import SettingError
from paceline.gossip.layout import Layout
from paceline.gossip.moments import Moments
from paceline.replica import Replica
from tests.problems import data, flat, mlp

MAKERS: dict[str, Any] = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "Adam": lambda p: Adam(p, lr=0.01),
    "AMSGrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: AdamW(p, lr=0.01, fused=True),
    "one by one": lambda p: AdamW(p, lr=0.01, foreach=False),
}


def moments_of(optimizer: Optimizer) -> Moments:
    return Moments(optimizer, {id(p) for group in optimizer.param_groups for p in group["params"]})


def trained(optimizer: Optimizer, model: nn.Module, steps: int) -> Tensor:
    x, y = data(40).tensors
    for step in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[step:]), y[step:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("kind", MAKERS)
def test_zeros_at_the_beginning_change_nothing(kind: str) -> None:
    expected = trained(MAKERS[kind]((usual := mlp()).parameters()), usual, 5)
    model = mlp()
    optimizer = MAKERS[kind](model.parameters())
    moments = moments_of(optimizer)
    each = {"SGD": 1, "Nesterov": 1, "AMSGrad": 3}.get(kind, 2)
    assert moments.numel == each * flat(model).numel()
    assert all(float(tensor.abs().sum()) == 0 for tensor in moments.tensors())
    assert torch.equal(trained(optimizer, model, 5), expected)
    assert sum(float(tensor.abs().sum()) > 0 for tensor in moments.tensors()) == each * 4


def test_a_row_of_numbers_has_parameters_and_moments() -> None:
    model = mlp()
    optimizer = Adam(model.parameters(), lr=0.01)
    layout = Layout(Replica(model, optimizer), moments_of(optimizer))
    trained(optimizer, model, 3)
    count = flat(model).numel()
    assert (layout.measured, layout.numel, layout.more) == (count, 3 * count, 0)
    row = torch.empty(layout.numel)
    layout.read(row)
    state = optimizer.state[next(model.parameters())]
    assert torch.equal(row[:count], flat(model))
    assert torch.equal(row[count : count + 48], state["exp_avg"].reshape(-1))
    assert torch.equal(row[2 * count : 2 * count + 48], state["exp_avg_sq"].reshape(-1))
    change = torch.full_like(row, -1.0)
    layout.add(change)
    again = torch.empty_like(row)
    layout.read(again)
    assert torch.equal(again[: 2 * count], row[: 2 * count] - 1.0)
    assert float(again[2 * count :].abs().max()) == 0.0  # squares do not fall below zero
    layout.write(row)
    layout.read(again)
    assert torch.equal(again, row)
    assert float(state["step"]) == 3
    layout.write(row - 1.0)  # a model that was given, or the average of all
    layout.read(again)
    assert torch.equal(again[: 2 * count], row[: 2 * count] - 1.0)
    assert float(again[2 * count :].abs().max()) == 0.0


def test_a_state_that_was_loaded_is_found() -> None:
    """Torch makes new tensors then."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    moments = moments_of(optimizer)
    trained(optimizer, model, 2)
    saved = optimizer.state_dict()
    trained(optimizer, model, 2)
    optimizer.load_state_dict(saved)
    found = moments.tensors()
    assert all(found[at] is optimizer.state[p]["momentum_buffer"] for at, p in enumerate(model.parameters()))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: SGD(p, lr=0.1), r"this SGD has no momentum that could be averaged"),
        (lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5), r"dampening \(0.5\) makes another start"),
        (lambda p: RMSprop(p, lr=0.1), r"knows the state of SGD, Adam and AdamW, not of RMSprop; use Keep\(\)"),
    ],
)
def test_what_cannot_be_averaged(make: Any, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        moments_of(make(mlp().parameters()))
