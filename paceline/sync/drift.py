"""The workers' weights, and how far their models have moved apart, from short images that ride with the average."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from paceline.records import Later
from paceline.sync.notes import Numbers, split_halves

__all__ = ["Drift"]

SIZE = 251  # numbers of an image; 9 % error of a squared distance for one worker, less for several
SAMPLE = 1 << 10  # numbers of a model that are looked at, if it has more: a pass over all of them would cost too much
LEAST = 16  # of every tensor: a small layer may be what moves
NEIGHBOURS = 8  # are looked at together: what costs is to fetch a place from memory


class Drift:
    """Every worker sends a sketch s_i of its model x_i and its weight w_i; with p_i = w_i / sum w all can compute

        sum_i p_i |s_i - sum_j p_j s_j|^2,

    which estimates the same expression of the models without bias: every number gets a random sign, and every 251st are
    added up, which is linear and keeps squared lengths on average. Of a large model, numbers drawn at random once and
    for all stand for the others of their tensor; they are so few that numpy is done before torch has begun.
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
        self.distance = Later(lambda: 0.0)
        """The root of the estimate, after the exchange."""
        self._samples: list[Callable[[], Numbers]] = []

    def lay_out(self, flats: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> None:
        """These flat tensors hold the model, times ``scale``, when the exchange begins.

        ``sizes`` are the numbers of what each of them consists of, one behind the other.
        """
        reals = [torch.view_as_real(flat).view(-1) if flat.is_complex() else flat for flat in flats]
        whole = sum(real.numel() for real in reals)
        generator = torch.Generator().manual_seed(self._seed)
        self._samples, self._bounds, factors = [], [0], []
        for flat, real, parts in zip(flats, reals, sizes, strict=True):
            places, begin = [], 0
            for part in parts:
                size = part * (2 if flat.is_complex() else 1)
                count = size if whole <= SAMPLE else _sample_size(size, whole)
                drawn = torch.arange(size) if count == size else _draw(size, count, generator)
                places.append(begin + drawn)
                factors += [math.sqrt(size / max(count, 1))] * count
                begin += size
            self._samples.append(_sampler(real, torch.cat(places) if places else torch.empty(0, dtype=torch.int64)))
            self._bounds.append(len(factors))
        rows = -(-len(factors) // SIZE)
        self._looked_at, self._signed = np.zeros(rows * SIZE), np.empty((rows, SIZE))
        self._signs = 2.0 * torch.randint(2, (rows, SIZE), generator=generator).numpy() - 1.0
        self._signs.reshape(-1)[: len(factors)] *= factors

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
        width = SIZE + 2
        weights = [high + low for high, low in zip(summed[::width].tolist(), summed[1::width].tolist(), strict=True)]
        self.whole = sum(weights)
        # Nobody may ask for it: then it costs nothing but this copy.
        self.distance = Later(partial(_distance, weights, summed.reshape(self._size, width).copy()))


def _distance(weights: list[float], table: Numbers) -> float:
    """The root of the estimate."""
    whole = sum(weights)
    if not whole > 0:
        return 0.0
    rows = table[:, 2:].astype(np.float64)
    shares = np.array(weights) / whole
    apart = rows - shares @ rows
    square = float(shares @ np.square(apart).sum(1))
    return math.sqrt(square) if math.isfinite(square) else math.inf


def _sample_size(size: int, whole: int) -> int:
    """How many of ``size`` numbers are looked at, of a model that has ``whole``."""
    return min(size, max(LEAST, NEIGHBOURS * -(-size * SAMPLE // (whole * NEIGHBOURS))))


def _draw(size: int, count: int, generator: torch.Generator) -> Tensor:
    """Places, a few neighbours at a time; each of them as likely as any other, since the last is next to the first."""
    starts = torch.randint(size, (count // NEIGHBOURS, 1), generator=generator).sort(0).values
    return (starts + torch.arange(NEIGHBOURS)).remainder(size).view(-1)


def _sampler(tensor: Tensor, places: Tensor) -> Callable[[], Numbers]:
    """Gives the numbers at some places of a flat tensor as they are then; for a few, numpy is faster than torch."""
    if tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16:
        return partial(tensor.numpy().take, places.numpy())
    there = places.to(tensor.device)
    return lambda: tensor.index_select(0, there).cpu().float().numpy()
