"""Orders that need no gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import SettingError
from paceline.order import FlipFlop, ShuffleBlocks


@given(length=st.integers(1, 50), epoch=st.integers(0, 9), seed=st.integers(0, 5), block=st.integers(1, 60))
def test_permutations_whose_reverse_follows(length: int, epoch: int, seed: int, block: int) -> None:
    for order in (FlipFlop(), ShuffleBlocks(block)):
        one, other = (order.permutation(length, each, seed) for each in (epoch // 2 * 2, epoch // 2 * 2 + 1))
        assert sorted(one.tolist()) == list(range(length))
        assert torch.equal(one.flip(0), other)


def test_every_other_epoch_is_fresh() -> None:
    for order in (FlipFlop(), ShuffleBlocks(10)):
        found = {tuple(order.permutation(100, epoch, 0).tolist()) for epoch in range(0, 10, 2)}
        assert len(found) == 5


def test_blocks_stay_together_and_are_mixed() -> None:
    order = ShuffleBlocks(10)
    blocks = [
        {frozenset(block.tolist()) for block in torch.split(order.permutation(100, epoch, 3), 10)}
        for epoch in (0, 2, 4)
    ]
    assert blocks[0] == blocks[1] == blocks[2]
    assert blocks[0] != {frozenset(block.tolist()) for block in torch.split(torch.arange(100), 10)}


@pytest.mark.parametrize("block", [0, -1, 2.0])
def test_bad_blocks(block: int) -> None:
    with pytest.raises(SettingError, match=r"ShuffleBlocks: block \(.*\) must be a whole number of at least 1"):
        ShuffleBlocks(block)
