from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.testing import digest


class Model(nn.Module):
    """Everything that may make a difference: parameters, buffers that are saved and that are not, other types."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 4)
        self.short = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.register_buffer("nothing", torch.zeros(0))
        nn.init.ones_(self.net.weight)
        nn.init.zeros_(self.net.bias)


def rename(model: Model) -> None:
    model.other = model.net
    del model.net


CHANGES: list[Callable[[Model], object]] = [
    lambda model: model.net.weight.data[0, 0].add_(1e-7),
    lambda model: model.short.data[1, 1].mul_(2),
    lambda model: model.count.add_(1),  # type: ignore[operator]
    lambda model: model.mask.fill_(True),  # type: ignore[operator]
    lambda model: model.net.double(),
    lambda model: setattr(model.short, "data", model.short.data.reshape(1, 4)),
    rename,
]


def test_equal_models_have_equal_digests() -> None:
    model = Model()
    model.net.weight.data = model.net.weight.data.T.contiguous().T  # another layout in memory, the same values
    assert digest(model) == digest(Model())
    assert len(digest(model)) == 64


@pytest.mark.parametrize("change", CHANGES)
def test_every_difference_counts(change: Callable[[Model], object]) -> None:
    model = Model()
    change(model)
    assert digest(model) != digest(Model())
