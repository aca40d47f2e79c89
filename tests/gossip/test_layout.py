"""A model as a row of numbers, and back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import LoopError, SettingError
from paceline.gossip.layout import Layout
from paceline.replica import Replica


def model(seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2)).to(dtype)
    made(torch.randn(4, 2, 3, 3, dtype=dtype))  # the statistics of BatchNorm, and its counter
    return made


def layout(of: nn.Module) -> Layout:
    return Layout(Replica(of, torch.optim.SGD(of.parameters(), lr=0.1)))


def row(of: Layout) -> torch.Tensor:
    out = torch.empty(of.numel + of.more)
    of.read(out)
    return out


@pytest.mark.parametrize("last", [torch.contiguous_format, torch.channels_last])
def test_who_takes_a_model_has_all_of_it(last: torch.memory_format) -> None:
    one, other = model(1), model(2)
    other(torch.randn(4, 2, 3, 3))
    one.to(memory_format=last)  # type: ignore[call-overload]
    ours, theirs = layout(one), layout(other)
    assert (ours.numel, ours.more, ours.counters().numel()) == (57 + 6 + 8, 6, 8)
    ours.write(row(theirs), theirs.counters())
    for name, value in other.state_dict().items():
        assert torch.equal(one.state_dict()[name], value), name


def test_a_change_is_added_to_parameters_alone() -> None:
    one = model(1)
    ours = layout(one)
    before = row(ours)
    ours.add(torch.arange(float(ours.numel)))
    after = row(ours)
    assert torch.equal(after[: ours.numel], before[: ours.numel] + torch.arange(float(ours.numel)))
    assert torch.equal(after[ours.numel :], before[ours.numel :])


def test_doubles_are_refused() -> None:
    with pytest.raises(SettingError, match=r"0.weight would lose digits; make the model float32"):
        layout(model(1, torch.float64))


def test_narrow_numbers_go_there_and_back() -> None:
    one = model(1).bfloat16()
    ours = layout(one)
    before = {name: value.clone() for name, value in one.state_dict().items()}
    ours.write(row(ours), ours.counters())
    assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())


def test_a_buffer_that_grows_is_refused() -> None:
    one = model(1)
    ours = layout(one)
    ours.check()
    one[1].running_mean = torch.zeros(5)
    with pytest.raises(LoopError, match="a buffer of the model has changed its size"):
        ours.check()
