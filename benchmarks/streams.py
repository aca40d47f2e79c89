"""Streams of examples in one process, as the workers of a run would have them: shuffled, or in a learnt order."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.order import PairBalancer
from paceline.probe.sketch import SignSketch

__all__ = ["Balanced", "Seen", "Shuffled", "Streams"]


class Seen(NamedTuple):
    """What examples did to a linear model: the gradient of each is the outer product of its rows."""

    inputs: Tensor
    errors: Tensor

    def gradients(self) -> Tensor:
        """All of them, flat."""
        return (self.inputs[:, :, None] * self.errors[:, None, :]).flatten(1)


class Streams(Protocol):
    """Gives the examples of every stream, epoch by epoch."""

    def next_epoch(self) -> list[list[int]]:
        """The orders of the epoch that begins."""

    def observe(self, seen: Seen, stream: int) -> None:
        """See the next examples of a stream."""


class Shuffled:
    """Each stream its own examples, in a fresh order (D-RR), or in every other epoch the reverse (FlipFlop)."""

    def __init__(self, parts: list[list[int]], seed: int, flip: bool = False) -> None:
        self._parts, self._flip = parts, flip
        self._random = torch.Generator().manual_seed(seed)
        self._epoch = 0

    def next_epoch(self) -> list[list[int]]:
        """A fresh order, or the reverse of the last."""
        if self._flip and self._epoch % 2:
            self._parts = [part[::-1] for part in self._parts]
        else:
            fresh = [torch.randperm(len(part), generator=self._random).tolist() for part in self._parts]
            self._parts = [[part[at] for at in order] for part, order in zip(self._parts, fresh, strict=True)]
        self._epoch += 1
        return self._parts

    def observe(self, seen: Seen, stream: int) -> None:
        """It does not look at them."""


class Balanced:
    """CD-GraB, or with a sum for each stream ID-GraB; with sketches of so many numbers, or whole gradients."""

    def __init__(self, parts: list[list[int]], coordinated: bool, sketch: int | None = None, bits: int = 32) -> None:
        self._parts, self._sketch, self._bits = parts, sketch, bits
        self._balancer = PairBalancer(parts, coordinated=coordinated)
        self._map: SignSketch | None = None
        self._begun = False

    def next_epoch(self) -> list[list[int]]:
        """What the last epoch has taught."""
        if self._begun:
            self._parts = self._balancer.next_orders()
        self._begun = True
        return self._parts

    def observe(self, seen: Seen, stream: int) -> None:
        """Keep the gradients, or what is left of them in so many numbers and bits."""
        self._balancer.observe(seen.gradients() if self._sketch is None else self._image(seen, self._sketch), stream)

    def _image(self, seen: Seen, size: int) -> Tensor:
        self._map = self._map or SignSketch(seen.inputs.shape[1] * seen.errors.shape[1], size)
        image = torch.zeros(len(seen.inputs), size)
        self._map.add_outer(image, seen.inputs, seen.errors, 0)
        if self._bits == 32:
            return image
        scale = image.abs().amax(1, keepdim=True).clamp(min=1e-30) / float(2 ** (self._bits - 1) - 1)
        return torch.round(image / scale) * scale
