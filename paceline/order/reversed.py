"""Orders that cost nothing and are better than chance: reversal and blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import SettingError

__all__ = ["FlipFlop", "ShuffleBlocks"]


@dataclass(frozen=True)
class FlipFlop:
    """A fresh permutation in every other epoch, and its reverse in the one after (Rajput, Lee, Papailiopoulos 2022)."""

    foresees = True

    def permutation(self, length: int, epoch: int, seed: int) -> Tensor:
        """A permutation that depends on the seed and half of the epoch."""
        found = torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch // 2))
        return found.flip(0) if epoch % 2 else found


@dataclass(frozen=True)
class ShuffleBlocks:
    """Blocks of a first permutation in a fresh order, each shuffled in itself; every other epoch is the reverse.

    A block's examples stay neighbours, which lets prefixes of an epoch vary less (block reshuffling with paired
    reversal).

    Args:
        block: examples of a block.
    """

    block: int

    foresees = True

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < 1:
            raise SettingError(f"ShuffleBlocks: block ({self.block!r}) must be a whole number of at least 1")

    def permutation(self, length: int, epoch: int, seed: int) -> Tensor:
        """A permutation that depends on the seed and half of the epoch."""
        first = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
        generator = torch.Generator().manual_seed(seed + 1 + epoch // 2)
        blocks = torch.split(first, self.block)
        order = torch.randperm(len(blocks), generator=generator).tolist()
        mixed = [blocks[at][torch.randperm(len(blocks[at]), generator=generator)] for at in order]
        found = torch.cat(mixed) if mixed else first
        return found.flip(0) if epoch % 2 else found
