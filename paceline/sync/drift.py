"""How far the workers' models have moved apart, from short images of them that ride with the average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from paceline.probe.sketch import SignSketch
from paceline.sync.notes import Numbers

__all__ = ["Drift"]

SIZE = 251  # a prime, as for the probe's sketches; 9 % error of a squared distance for one worker, less for several
SAMPLE = 1 << 13  # numbers of a model that are looked at, if it has more: a pass over all of them would cost too much


class Drift:
    """Every worker sends a sketch s_i of its model x_i and its weight w_i; with p_i = w_i / sum w all can compute

        sum_i p_i |s_i - sum_j p_j s_j|^2,

    which estimates the same expression of the models without bias, since the sketch is linear and keeps squared
    lengths on average. Of a large model, numbers drawn at random once and for all stand for all of them.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
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
        generator = torch.Generator().manual_seed(0)
        self._places = [
            None
            if count == tensor.numel()
            else torch.randint(tensor.numel(), (count,), generator=generator).sort().values.to(tensor.device)
            for tensor, count in zip(tensors, taken, strict=True)
        ]
        self._offsets = list(accumulate(taken, initial=0))[:-1]
        self._sketch = SignSketch(sum(taken), SIZE, device=tensors[0].device if tensors else "cpu")

    def write(self, out: Numbers) -> None:
        """This worker's row of a table of zeros."""
        out.fill(0.0)
        if self.weight:
            row = out.reshape(self._size, SIZE + 1)[self._rank]
            row[0] = self.weight
            row[1:] = self._sketch.of(self._looked_at(), self._offsets).cpu().numpy() / self.scale

    def _looked_at(self) -> list[Tensor]:
        return [
            tensor if places is None else tensor[places] * math.sqrt(tensor.numel() / places.numel())
            for tensor, places in zip(self._tensors, self._places, strict=True)
        ]

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
