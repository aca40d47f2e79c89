"""The sampler: an ordinary loader and loop, whose order follows the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import LoopError, SettingError
from paceline.order import BalancedSampler, MeanBalancer, PairBalancer, herding_bound

LENGTH = 301


def problem() -> tuple[nn.Linear, TensorDataset]:
    torch.manual_seed(0)
    x = torch.randn(LENGTH, 20)
    return nn.Linear(20, 3), TensorDataset(x, (x @ torch.randn(20, 3) + torch.randn(LENGTH, 3)).argmax(1))


def per_example(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    def loss(parameters: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (one.unsqueeze(0),)), target.unsqueeze(0))

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found: dict[str, Tensor] = vmap(grad(loss), (None, 0, 0))(parameters, x, y)
    return found


def orders(sampler: BalancedSampler, epochs: int, loaders: int = 0) -> list[list[int]]:
    """The orders of so many epochs of a model that does not move, read off the examples that come."""
    model, dataset = problem()
    numbered = TensorDataset(*dataset.tensors, torch.arange(LENGTH))
    found = []
    for _ in range(epochs):
        ids: list[int] = []
        for x, y, number in DataLoader(numbered, batch_size=16, sampler=sampler, num_workers=loaders):
            sampler.observe(per_example(model, x, y))
            ids += number.tolist()
        found.append(ids)
    return found


@pytest.mark.parametrize("balancer", [PairBalancer, MeanBalancer])
@pytest.mark.parametrize("sketch", [None, 32])
def test_every_epoch_has_every_example_once_and_the_last_is_better_than_chance(
    balancer: Any, sketch: int | None
) -> None:
    found = orders(BalancedSampler(LENGTH, balancer=balancer, sketch=sketch), 6)
    assert all(sorted(ids) == list(range(LENGTH)) for ids in found)
    model, dataset = problem()
    gradients = torch.cat([each.flatten(1) for each in per_example(model, *dataset.tensors).values()], 1)
    generator = torch.Generator().manual_seed(5)
    chance = [herding_bound(gradients[torch.randperm(LENGTH, generator=generator)]) for _ in range(30)]
    assert herding_bound(gradients[found[-1]]) < min(chance)


def test_loader_processes_make_no_difference() -> None:
    assert orders(BalancedSampler(LENGTH), 3) == orders(BalancedSampler(LENGTH), 3, loaders=2)


def test_it_goes_on_from_its_state() -> None:
    whole = orders(BalancedSampler(LENGTH), 4)
    first = BalancedSampler(LENGTH)
    assert orders(first, 2) == whole[:2]
    again = BalancedSampler(LENGTH, seed=7)
    again.load_state_dict(first.state_dict())
    assert orders(again, 2) == whole[2:]


def test_bad_use() -> None:
    sampler = BalancedSampler(10)
    assert len(sampler) == 10
    with pytest.raises(LoopError, match="observed before the sampler has given an example"):
        sampler.observe(torch.zeros(2, 3))
    assert sorted(sampler) == list(range(10))
    sampler.observe([torch.zeros(4, 2, 2), torch.zeros(4, 3)])
    with pytest.raises(
        LoopError, match=r"the epoch is not over \(4 of 10 gradients were observed\).*save between epochs"
    ):
        sampler.state_dict()
    with pytest.raises(LoopError, match="no gradients were given"):
        sampler.observe({})
    with pytest.raises(LoopError, match=r"an epoch has ended in which gradients of 4 of 10 units were seen"):
        iter(sampler)
    with pytest.raises(SettingError, match=r"the state is of 10 examples, this sampler of 11; use the same data"):
        BalancedSampler(11).load_state_dict(BalancedSampler(10).state_dict())
    with pytest.raises(SettingError, match=r"length \(0\) must be at least 1"):
        BalancedSampler(0)
