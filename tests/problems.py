"""Small training problems, built the same way in every process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import paceline as pl


def data(length: int, features: int = 6, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(length, features, generator=generator)
    y = (x @ torch.randn(features, classes, generator=generator)).argmax(1)
    return TensorDataset(x, y)


def mlp(features: int = 6, classes: int = 3, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, classes)).to(dtype)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def train(
    run: pl.Run,
    model: nn.Module,
    *,
    each: Callable[[pl.Step], None] = lambda step: None,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    **goal: int,
) -> None:
    """The loop of the README."""
    for step in run.steps(**goal):
        run.optimizer.zero_grad()
        for x, y in step:
            step.backward(loss(model(x), y))
        run.optimizer.step()
        each(step)


class Numbered(Dataset[Any]):
    """Example i is the number i; remembers nothing, so it can be pickled to loader processes."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: int) -> Tensor:
        return torch.tensor([float(at)])
