"""AdaGradNorm against the formula, and what every optimizer of torch can do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.optim import AdaGradNorm


def gradients(parameters: list[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def make(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((3, 4), (5,), (2, 2))]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("initial", [0.0, 2.0])
def test_it_is_the_formula(initial: float, weight_decay: float) -> None:
    parameters = make()
    expected = [parameter.detach().clone() for parameter in parameters]
    optimizer = AdaGradNorm(parameters, lr=0.3, initial=initial, weight_decay=weight_decay)
    total = initial
    for step in range(5):
        gradients(parameters, step)  # type: ignore[arg-type]
        optimizer.step()
        grads = [p.grad + weight_decay * e for p, e in zip(parameters, expected, strict=True)]  # type: ignore[operator]
        total += sum(float(g.square().sum()) for g in grads)
        expected = [e - 0.3 / (total**0.5 + 1e-10) * g for e, g in zip(expected, grads, strict=True)]
        for parameter, value in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter.detach(), value, rtol=1e-12, atol=0)


def test_the_first_step_has_the_length_of_the_learning_rate() -> None:
    parameters = make()
    before = torch.cat([p.detach().reshape(-1) for p in parameters])
    gradients(parameters, 0)  # type: ignore[arg-type]
    AdaGradNorm(parameters, lr=0.25).step()
    after = torch.cat([p.detach().reshape(-1) for p in parameters])
    assert float((after - before).norm()) == pytest.approx(0.25)


def test_groups_have_their_own_sums_and_rates() -> None:
    together = make()
    apart = [make(), make()]
    groups: list[dict[str, Any]] = [{"params": together[:1], "lr": 0.1}, {"params": together[1:]}]
    optimizer = AdaGradNorm(groups, lr=0.2)
    alone = [AdaGradNorm(apart[0][:1], lr=0.1), AdaGradNorm(apart[1][1:], lr=0.2)]
    for step in range(3):
        for parameters in (together, *apart):
            gradients(parameters, step)  # type: ignore[arg-type]
        for each in (optimizer, *alone):
            each.step()
    assert torch.equal(together[0], apart[0][0])
    assert all(torch.equal(a, b) for a, b in zip(together[1:], apart[1][1:], strict=True))


def test_a_parameter_without_a_gradient_stays() -> None:
    parameters = make()
    optimizer = AdaGradNorm(parameters)
    optimizer.step()
    assert not optimizer.state
    gradients(parameters[1:], 0)  # type: ignore[arg-type]
    before = parameters[0].detach().clone()
    optimizer.step()
    assert torch.equal(parameters[0], before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_resume_is_exact(dtype: torch.dtype) -> None:
    first = make(dtype)
    optimizer = AdaGradNorm(first, lr=0.3)
    for step in range(3):
        gradients(first, step)  # type: ignore[arg-type]
        optimizer.step()
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    resumed = AdaGradNorm(second, lr=1.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameters, each in ((first, optimizer), (second, resumed)):
        gradients(parameters, 9)  # type: ignore[arg-type]
        each.step()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert resumed.state[second[0]]["sum"].dtype == torch.float64


def test_mixed_precision_of_parameters() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, dtype=torch.float64))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    AdaGradNorm(parameters, lr=1.0).step()
    torch.testing.assert_close(parameters[0].detach(), torch.full((3,), 1 - 5**-0.5))
    torch.testing.assert_close(parameters[1].detach(), torch.full((2,), 1 - 5**-0.5, dtype=torch.float64))


def test_a_closure_is_called() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimizer = AdaGradNorm([parameter], lr=0.5)

    def closure() -> float:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert parameter.item() == pytest.approx(1.5)


@pytest.mark.parametrize("name", ["lr", "initial", "eps", "weight_decay"])
def test_bad_settings(name: str) -> None:
    with pytest.raises(pl.SettingError, match=name):
        AdaGradNorm(make(), **{name: -1.0})


def test_complex_and_sparse_are_refused() -> None:
    with pytest.raises(pl.SettingError, match="real parameters"):
        AdaGradNorm([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    grown = AdaGradNorm([nn.Parameter(torch.zeros(2))])
    with pytest.raises(pl.SettingError, match="real parameters"):
        grown.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]})
    assert len(grown.param_groups) == 1
    table = nn.Embedding(5, 2, sparse=True)
    optimizer = AdaGradNorm(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(pl.SettingError, match="sparse"):
        optimizer.step()
