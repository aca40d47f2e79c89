"""What a worker has seen of units: places, weights and images of gradients, and how they travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.records import Plan

__all__ = ["Fragment", "fragments_of", "pack", "unpack"]


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
    for row, (step, start, examples, weight, image) in zip(table, fragments, strict=True):
        row["step"], row["start"], row["examples"] = step, start, examples
        values = image.cpu().numpy().astype(np.float64)
        if not weight or not np.isfinite(values).all():
            continue
        row["weight"], row["scale"] = weight, 1.0
        if number == "i1":
            row["scale"] = max(float(np.abs(values).max()) / 127, 1e-38)
            values = np.rint(values / row["scale"])
        row["image"] = values
    return table.tobytes()


def unpack(blob: bytes, size: int, number: str) -> list[Fragment]:
    """What :func:`pack` has packed."""
    table = np.frombuffer(blob, dtype=_row(size, number))
    images = torch.from_numpy(table["image"] * table["scale"][:, None].astype(np.float64))
    return [
        Fragment(int(row["step"]), int(row["start"]), int(row["examples"]), float(row["weight"]), image)
        for row, image in zip(table, images, strict=True)
    ]


def _row(size: int, number: str) -> np.dtype[np.void]:
    head = [("step", "<i8"), ("start", "<i8"), ("examples", "<i4"), ("weight", "<f4"), ("scale", "<f4")]
    return np.dtype([*head, ("image", number, (size,))])
