"""What a worker has seen of units: places, weights and images of gradients, and how they travel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.records import Plan

__all__ = ["Fold", "Fragment", "fragments_of", "pack", "unpack"]


class Fragment(NamedTuple):
    """A unit, or a part of one: what a worker did of it in one pass."""

    step: int
    start: int
    """Its first position in the order of the epoch."""
    examples: int
    weight: float
    """What its mean was taken over; 0 if nothing is known of its gradient."""
    image: Tensor
    """Of its mean gradient."""


class Fold:
    """Makes images still shorter: numbers times random signs, added up in rows of ``size``.

    Images have a few thousand numbers, so that each can have a sign of its own, and those of a step are done at once.
    """

    def __init__(self, length: int, size: int, seed: int) -> None:
        self._size, self._rows = size, -(-length // size)
        drawn = torch.randint(0, 2, (length,), generator=torch.Generator().manual_seed(seed))
        self._signs = drawn.mul_(2).sub_(1)

    def of(self, images: Tensor) -> Tensor:
        """(units, length) → (units, size)."""
        signed = images.cpu() * self._signs
        padded = torch.nn.functional.pad(signed, (0, self._rows * self._size - signed.shape[1]))
        return padded.view(len(images), self._rows, self._size).sum(1)


def fragments_of(
    plan: Plan, rank: int, weights: Sequence[float], images: Sequence[Tensor], single: bool
) -> list[Fragment]:
    """The fragments that a worker has done in a step, by the weights of its pieces.

    There is an image for each piece of weight above zero, or, if ``single``, for each of their examples.
    """
    found: list[Fragment] = []
    rest = iter(images)
    for (start, stop), weight in zip(plan.pieces(rank), weights, strict=True):
        for first, last in plan.spans(start, stop):
            size = 1 if single else last - first
            for at in range(first, last, size):
                image = next(rest) if weight else torch.zeros(1)
                found.append(Fragment(plan.step, at, size, weight * size / (stop - start), image))
    return found


def pack(fragments: Sequence[Fragment], size: int, number: str) -> bytes:
    """As bytes, images of ``size`` numbers as ``number``: ``"i1"`` is 8 bits, with a scale for each image.

    What is not finite (a loss scale that was too large) has weight 0 then.
    """
    table = np.zeros(len(fragments), dtype=_row(size, number))
    for at, name in enumerate(("step", "start", "examples", "weight")):
        table[name] = [each[at] for each in fragments]
    usable = [bool(each.weight) and bool(each.image.isfinite().all()) for each in fragments]
    table["weight"] *= usable
    if known := [at for at, good in enumerate(usable) if good]:
        images = torch.stack([fragments[at].image for at in known]).cpu().double().numpy()
        scale = np.maximum(np.abs(images).max(1) / 127, 1e-38) if number == "i1" else np.ones(len(known))
        table["scale"][known] = scale
        images = images / table["scale"][known][:, None]  # as the receiver will multiply
        table["image"][known] = np.rint(images) if number == "i1" else images
    return table.tobytes()


def unpack(blob: bytes, size: int, number: str) -> list[Fragment]:
    """What :func:`pack` has packed."""
    table = np.frombuffer(blob, dtype=_row(size, number))
    images = torch.from_numpy(table["image"] * table["scale"][:, None].astype(np.float64))
    columns = [table[name].tolist() for name in ("step", "start", "examples", "weight")]
    return list(starmap(Fragment, zip(*columns, images, strict=True)))


def _row(size: int, number: str) -> np.dtype[np.void]:
    head = [("step", "<i8"), ("start", "<i8"), ("examples", "<i4"), ("weight", "<f4"), ("scale", "<f4")]
    return np.dtype([*head, ("image", number, (size,))])
