"""The weighted average of all workers' models, in one flat buffer for each dtype."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import LoopError
from paceline.fleet import Fleet
from paceline.roles import Codec
from paceline.sync.flat import FlatSum, Rider
from paceline.sync.notes import Numbers

__all__ = ["Weight", "WeightedAverage"]


class Weight:
    """The sum of the workers' weights, which rides along."""

    numel = 1

    def __init__(self) -> None:
        self.own = 0.0
        self.all = 0.0

    def write(self, out: Numbers) -> None:
        """This worker's."""
        out[0] = self.own

    def read(self, summed: Numbers) -> None:
        """Everybody's."""
        self.all = float(summed[0])


class WeightedAverage:
    """sum_i w_i x_i / sum_i w_i over the workers i, for lists of tensors x_i.

    A worker of weight zero contributes nothing, not even an infinity, and gets the average as all others do.
    """

    def __init__(self, fleet: Fleet, codec: Codec) -> None:
        self._fleet = fleet
        self._sum = FlatSum(fleet, codec)
        self._weight = Weight()
        self._layout: object = None

    @property
    def bytes_sent(self) -> int:
        """What this worker handed to the network layer in the last average."""
        return self._sum.bytes_sent

    @torch.no_grad()
    def of(
        self, tensors: Sequence[Tensor], weight: float, scale: float, riders: Sequence[Rider], what: str
    ) -> Sequence[Tensor]:
        """The average of these tensors over the workers: views of a buffer that the next call uses again.

        If all weights are zero, nobody has done anything, and the tensors are given back as they are.

        ``weight`` is this worker's. ``scale`` is a number of the size of all weights together, the same on all workers:
        weights are divided by it before they travel, so that sums are about as large as averages.
        """
        riders = [self._weight, *riders]
        shapes = [(tuple(each.shape), str(each.dtype)) for each in tensors]
        layout = (shapes, sum(rider.numel for rider in riders))
        if layout != self._layout:
            digest = zlib.crc32(repr(shapes).encode())
            self._fleet.agree({"set of averaged tensors": f"{len(shapes)} of digest {digest}"})
            self._sum.lay_out(tensors, layout[1])
            self._layout = layout
        self._weight.own = weight / scale
        if weight:
            self._sum.pack(tensors, weight / scale)
        else:
            self._sum.pack([None] * len(tensors), 1.0)
        self._sum.run(riders, what)
        if self.whole == 0:
            return tensors
        if not (self.whole > 0 and math.isfinite(self.whole)):
            raise LoopError(
                f"the weights of all workers add up to {self.whole * scale} in {what}; they must be positive"
            )
        if self.whole != 1.0:
            for body in self._sum.bodies:
                body.mul_(1.0 / self.whole)
        return self._sum.views

    @property
    def whole(self) -> float:
        """What the weights of the last average added up to, over its scale."""
        return self._weight.all
