"""Images that stay bytes in memory and become numbers when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["Images"]


class Images(Dataset[tuple[Tensor, ...]]):
    """Pairs of a normalised float32 image and its class, in a quarter of the memory of a ``TensorDataset``.

    ``pixels`` is uint8 (N, C, H, W), ``labels`` int64 (N); ``mean`` and ``std`` are for each channel, for
    pixels scaled to 0..1.
    """

    def __init__(self, pixels: Tensor, labels: Tensor, *, mean: Sequence[float], std: Sequence[float]) -> None:
        self.pixels = pixels
        self.labels = labels
        self._mean = 255 * torch.tensor(mean).view(-1, 1, 1)
        self._std = 255 * torch.tensor(std).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return (self.pixels[index] - self._mean) / self._std, self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Many examples at once, for torch's ``DataLoader``."""
        chosen = torch.as_tensor(indices)
        images = (self.pixels[chosen] - self._mean) / self._std
        return list(zip(images, self.labels[chosen], strict=True))
