"""How far the workers' models have moved apart, from short images of them that ride with the average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from paceline.sync.notes import Numbers

__all__ = ["Drift"]

SIZE = 251  # numbers of an image; 9 % error of a squared distance for one worker, less for several
SAMPLE = 1 << 11  # numbers of a model that are looked at, if it has more: a pass over all of them would cost too much


class Drift:
    """Every worker sends a sketch s_i of its model x_i and its weight w_i; with p_i = w_i / sum w all can compute

        sum_i p_i |s_i - sum_j p_j s_j|^2,

    which estimates the same expression of the models without bias: every number gets a random sign, and every 251st are
    added up, which is linear and keeps squared lengths on average. Of a large model, numbers drawn at random once and
    for all stand for all of them; they are so few that numpy is done before torch has begun.
    """

    def __init__(self, rank: int, size: int, seed: int = 0) -> None:
        self._rank, self._size, self._seed = rank, size, seed
        self.numel = size * (SIZE + 1)
        """A sketch and a weight for each worker."""
        self.weight = 0.0
        """This worker's: set it before the exchange."""
        self.scale = 1.0
        """What the tensors have been multiplied by."""
        self.distance = 0.0
        """The root of the estimate, after the exchange."""
        self._tensors: list[Tensor] = []

    def lay_out(self, tensors: Sequence[Tensor]) -> None:
        """These flat tensors hold the model, times ``scale``, when the exchange begins."""
        self._tensors = list(tensors)
        sizes = [tensor.numel() for tensor in tensors]
        taken = [size if sum(sizes) <= SAMPLE else -(-size * SAMPLE // sum(sizes)) for size in sizes]
        generator = torch.Generator().manual_seed(self._seed)
        self._places = [
            None
            if count == tensor.numel()
            else torch.randint(tensor.numel(), (count,), generator=generator).sort().values.to(tensor.device)
            for tensor, count in zip(tensors, taken, strict=True)
        ]
        self._bounds = list(accumulate(taken, initial=0))
        rows = -(-self._bounds[-1] // SIZE)
        self._looked_at = np.zeros(rows * SIZE)
        signs = 2.0 * torch.randint(2, (rows, SIZE), generator=generator).numpy() - 1.0
        for (start, stop), size in zip(pairwise(self._bounds), sizes, strict=True):
            signs.reshape(-1)[start:stop] *= math.sqrt(size / max(stop - start, 1))
        self._signs = signs

    def write(self, out: Numbers) -> None:
        """This worker's row of a table of zeros."""
        out.fill(0.0)
        if not self.weight:
            return
        for tensor, places, (start, stop) in zip(self._tensors, self._places, pairwise(self._bounds), strict=True):
            sample = tensor if places is None else tensor.index_select(0, places)
            self._looked_at[start:stop] = sample.cpu().float() if sample.dtype == torch.bfloat16 else sample.cpu()
        row = out.reshape(self._size, SIZE + 1)[self._rank]
        row[0] = self.weight
        row[1:] = np.einsum("ij,ij->j", self._looked_at.reshape(-1, SIZE), self._signs) / self.scale

    def read(self, summed: Numbers) -> None:
        """Take the table."""
        table = summed.reshape(self._size, SIZE + 1).astype(np.float64)
        weights, rows = table[:, 0], table[:, 1:]
        self.distance = 0.0
        if (whole := weights.sum()) > 0:
            shares = weights / whole
            apart = rows - shares @ rows
            square = float(shares @ np.square(apart).sum(1))
            self.distance = math.sqrt(square) if math.isfinite(square) else math.inf
