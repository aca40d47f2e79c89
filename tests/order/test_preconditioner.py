"""What optimizers divide gradients by, beside the steps that they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from paceline.order.preconditioner import DIVISORS, factors_of

STEPS = 12
NUMBERS = 50

# Without momentum, so that a step is along the gradient over its divisor; with an eps that counts.
WITHOUT: dict[str, Any] = {"lr": 0.1, "betas": (0.0, 0.9), "eps": 1e-2}
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "Adam": lambda ps: optim.Adam(ps, **WITHOUT),
    "AdamW": lambda ps: optim.AdamW(ps, weight_decay=0.0, **WITHOUT),
    "amsgrad": lambda ps: optim.AdamW(ps, weight_decay=0.0, amsgrad=True, **WITHOUT),
    "NAdam": lambda ps: optim.NAdam(ps, **WITHOUT),
    "RAdam": lambda ps: optim.RAdam(ps, **WITHOUT),
    "Adamax": lambda ps: optim.Adamax(ps, **WITHOUT),
    "Adagrad": lambda ps: optim.Adagrad(ps, lr=0.1, eps=1e-2),
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=0.1, alpha=0.9, eps=1e-2),
    "centered": lambda ps: optim.RMSprop(ps, lr=0.1, alpha=0.9, eps=1e-2, centered=True),
}


def trained(optimizer: optim.Optimizer, parameter: nn.Parameter, steps: int) -> Tensor:
    """What the last of some steps has added to the parameter."""
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-2, 1, NUMBERS, dtype=torch.float64)
    before = parameter.detach().clone()
    for step in range(steps):
        before = parameter.detach().clone()
        noise = torch.randn(NUMBERS, generator=generator, dtype=torch.float64)
        parameter.grad = size * (noise + 0.5) / (1 + step % 3)
        optimizer.step()
    return parameter.detach() - before


def parameter(count: int = NUMBERS) -> nn.Parameter:
    return nn.Parameter(torch.zeros(count, dtype=torch.float64))


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_gradients_are_divided_as_in_the_optimizers_own_step(kind: str) -> None:
    only = parameter()
    optimizer = OPTIMIZERS[kind]([only])
    change = trained(optimizer, only, STEPS)
    found = factors_of(optimizer)
    assert found is not None
    assert only.grad is not None
    direction = -only.grad * found[only]
    # A step is that, times one number for all: the rate, and for RAdam what its average is not yet long enough for.
    torch.testing.assert_close(direction / direction.norm(), change / change.norm(), rtol=1e-12, atol=0)
    if kind != "RAdam":
        torch.testing.assert_close(0.1 * direction, change, rtol=1e-12, atol=0)


def test_all_that_are_known_are_tried() -> None:
    made = {type(make([parameter()])) for make in OPTIMIZERS.values()}
    assert made == set(DIVISORS)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_nothing_is_known_before_the_first_step(kind: str) -> None:
    assert factors_of(OPTIMIZERS[kind]([parameter()])) is None


def test_radam_divides_by_nothing_in_its_first_steps() -> None:
    only = parameter()
    optimizer = OPTIMIZERS["RAdam"]([only])
    change = trained(optimizer, only, 5)
    assert only.grad is not None
    torch.testing.assert_close(change, -0.1 * only.grad)
    assert factors_of(optimizer) is None


def test_groups_have_settings_of_their_own() -> None:
    first, second = parameter(), parameter()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "eps": 0.5, "betas": (0.0, 0.5)}]
    optimizer = optim.Adam(groups, **WITHOUT)
    for step in range(3):
        first.grad = second.grad = torch.full_like(first, 1.0 + step)
        optimizer.step()
    found = factors_of(optimizer)
    assert found is not None
    for one, beta, eps in ((first, 0.9, 1e-2), (second, 0.5, 0.5)):
        moment = (1 - beta) * (1 * beta**2 + 4 * beta + 9) / (1 - beta**3)
        torch.testing.assert_close(found[one], torch.full_like(one, 1 / (moment**0.5 + eps)))


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_what_had_no_gradient_has_no_scale(kind: str) -> None:
    """Over eps alone, its first gradient would be millions of times as large as all others."""
    some, never = parameter(), parameter()
    optimizer = OPTIMIZERS[kind]([some, never])
    for step in range(STEPS):
        some.grad = torch.full_like(some, float(step % 3 - 1))  # what never varies has no spread
        some.grad[::2] = 0.0
        optimizer.step()
    found = factors_of(optimizer)
    assert found is not None
    assert some.grad is not None
    assert not found[some][some.grad == 0].any()
    assert bool(found[some][some.grad != 0].all())
    assert never not in found


def test_half_precision_is_divided_in_single_precision() -> None:
    only = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = optim.Adam([only], eps=0.0)
    only.grad = torch.full_like(only, 3.0)
    optimizer.step()
    found = factors_of(optimizer)
    assert found is not None
    assert found[only].dtype == torch.float32
    torch.testing.assert_close(found[only], torch.full((4,), 1 / 3), rtol=2**-7, atol=0)
