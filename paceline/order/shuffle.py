"""Orders that do not look at gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sequential", "Shuffle", "ShuffleOnce"]


@dataclass(frozen=True)
class Shuffle:
    """A fresh permutation for every epoch (random reshuffling): the default.

    The permutation is that of torch's ``DistributedSampler`` with the same seed, so each step takes the same
    examples as a hand-written loop with it.
    """

    foresees = True

    def permutation(self, length: int, epoch: int, seed: int) -> Tensor:
        """A permutation that depends on the seed and the epoch."""
        return torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch))


@dataclass(frozen=True)
class ShuffleOnce:
    """One permutation for all epochs."""

    foresees = True

    def permutation(self, length: int, epoch: int, seed: int) -> Tensor:
        """A permutation that depends on the seed alone."""
        return torch.randperm(length, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Sequential:
    """The order of the data set, unshuffled."""

    foresees = True

    def permutation(self, length: int, epoch: int, seed: int) -> Tensor:
        """0, 1, 2, …"""
        return torch.arange(length)
