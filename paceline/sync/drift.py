"""The workers' weights, and how far their models have moved apart, from short images that ride with the average."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from paceline.sync.notes import Numbers, split_halves

__all__ = ["Drift"]

SIZE = 251  # numbers of an image; 9 % error of a squared distance for one worker, less for several
SAMPLE = 1 << 11  # numbers of a model that are looked at, if it has more: a pass over all of them would cost too much
NEIGHBOURS = 4  # are looked at together: what costs is to fetch a place from memory


class Drift:
    """Every worker sends a sketch s_i of its model x_i and its weight w_i; with p_i = w_i / sum w all can compute

        sum_i p_i |s_i - sum_j p_j s_j|^2,

    which estimates the same expression of the models without bias: every number gets a random sign, and every 251st are
    added up, which is linear and keeps squared lengths on average. Of a large model, numbers drawn at random once and
    for all stand for all of them; they are so few that numpy is done before torch has begun.
    """

    def __init__(self, rank: int, size: int, seed: int = 0) -> None:
        self._rank, self._size, self._seed = rank, size, seed
        self.numel = size * (SIZE + 2)
        """A weight and a sketch for each worker.

        A weight is two numbers: nothing of it is lost in single precision, which double parameters would feel.
        """
        self.weight = 0.0
        """This worker's: set it before the exchange."""
        self.whole = 0.0
        """The sum of all workers' weights, after the exchange."""
        self.scale = 1.0
        """What the tensors have been multiplied by."""
        self.distance = 0.0
        """The root of the estimate, after the exchange."""
        self._samples: list[Callable[[], Numbers]] = []

    def lay_out(self, tensors: Sequence[Tensor]) -> None:
        """These flat tensors hold the model, times ``scale``, when the exchange begins."""
        sizes = [tensor.numel() for tensor in tensors]
        taken = [size if sum(sizes) <= SAMPLE else _sample_size(size, sum(sizes)) for size in sizes]
        generator = torch.Generator().manual_seed(self._seed)
        places = [
            None if count == size else _draw(size, count, generator)
            for size, count in zip(sizes, taken, strict=True)
        ]
        self._samples = [_sampler(*each) for each in zip(tensors, places, strict=True)]
        self._bounds = list(accumulate(taken, initial=0))
        rows = -(-self._bounds[-1] // SIZE)
        self._looked_at, self._signed = np.zeros(rows * SIZE), np.empty((rows, SIZE))
        signs = 2.0 * torch.randint(2, (rows, SIZE), generator=generator).numpy() - 1.0
        for (start, stop), size in zip(pairwise(self._bounds), sizes, strict=True):
            signs.reshape(-1)[start:stop] *= math.sqrt(size / max(stop - start, 1))
        self._signs = signs

    def write(self, out: Numbers) -> None:
        """This worker's row of a table of zeros."""
        out.fill(0.0)
        if not self.weight:
            return
        for sample, (start, stop) in zip(self._samples, pairwise(self._bounds), strict=True):
            self._looked_at[start:stop] = sample()
        np.multiply(self._looked_at.reshape(-1, SIZE), self._signs, out=self._signed)
        row = out[self._rank * (SIZE + 2) : (self._rank + 1) * (SIZE + 2)]
        (row[0],), (row[1],) = split_halves([self.weight])
        row[2:] = self._signed.sum(0) / self.scale

    def read(self, summed: Numbers) -> None:
        """Take the table."""
        table = summed.reshape(self._size, SIZE + 2).astype(np.float64)
        weights, rows = table[:, 0] + table[:, 1], table[:, 2:]
        self.whole, self.distance = float(weights.sum()), 0.0
        if self.whole > 0:
            shares = weights / self.whole
            apart = rows - shares @ rows
            square = float(shares @ np.square(apart).sum(1))
            self.distance = math.sqrt(square) if math.isfinite(square) else math.inf


def _sample_size(size: int, whole: int) -> int:
    """How many of ``size`` numbers are looked at, of a model that has ``whole``."""
    return min(size, NEIGHBOURS * -(-size * SAMPLE // (whole * NEIGHBOURS)))


def _draw(size: int, count: int, generator: torch.Generator) -> Tensor:
    """Places, a few neighbours at a time; each of them as likely as any other, since the last is next to the first."""
    starts = torch.randint(size, (count // NEIGHBOURS, 1), generator=generator).sort(0).values
    return (starts + torch.arange(NEIGHBOURS)).remainder(size).view(-1)


def _sampler(tensor: Tensor, places: Tensor | None) -> Callable[[], Numbers]:
    """Gives the numbers at some places of a flat tensor as they are then; for a few, numpy is faster than torch."""
    if tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16:
        array = tensor.numpy()
        return (lambda: array) if places is None else partial(array.take, places.numpy())
    there = None if places is None else places.to(tensor.device)
    return lambda: (tensor if there is None else tensor.index_select(0, there)).cpu().float().numpy()
