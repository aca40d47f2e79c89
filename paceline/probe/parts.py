"""The gradients of one parameter for all examples of a batch, formed for a few of them at a time, or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.probe.norms import row_sqnorms
from paceline.probe.sketch import LinearMap

__all__ = ["Conv", "Part", "Parts", "Sums", "formed", "of_convolution", "of_linear"]

# Numbers that are formed at a time: fewer make more calls, more do not stay in a cache from one pass to the next.
BLOCK = 1 << 20

Conv: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True)
class Sums:
    """Where what is wanted of the gradients is added to, parameter by parameter; None for what is not wanted."""

    images: Tensor | None  # (B, size)
    sqnorms: Tensor | None  # (B,)
    squares: Tensor | None  # like the parameter: over all examples
    mapping: LinearMap
    offset: int
    """Of the parameter in the flat gradient."""
    limit: int
    """Numbers that may be formed at a time."""


class Part(Protocol):
    """The gradients of one parameter, one for each example."""

    def add_to(self, sums: Sums) -> None:
        """Add what is wanted of them."""


Parts: TypeAlias = dict[Tensor, Part]


@dataclass(frozen=True)
class Outer:
    """Outer products delta a^T, of which nothing has to be formed but images without numba."""

    deltas: Tensor  # (B, n)
    inputs: Tensor  # (B, m)

    def add_to(self, sums: Sums) -> None:
        """Add what is wanted of them. ||delta a^T|| = ||delta|| ||a||; sums of squares are a product of matrices."""
        if sums.sqnorms is not None:
            norms = (torch.linalg.vector_norm(each, dim=1, dtype=torch.float64) for each in (self.deltas, self.inputs))
            sums.sqnorms.add_(math.prod(norms).square())
        if sums.squares is not None:
            sums.squares.add_(self.deltas.square().T @ self.inputs.square())
        if sums.images is not None:
            sums.mapping.add_outer(sums.images, self.deltas, self.inputs, sums.offset)


@dataclass(frozen=True)
class Several:
    """Gradients that are formed for several examples at a time."""

    examples: int
    numbers: int
    """How many it takes to form one."""
    form: Callable[[slice], Tensor]
    """The flat gradients of some examples, one a row."""

    def add_to(self, sums: Sums) -> None:
        """Add what is wanted of them."""
        count = max(1, min(sums.limit, BLOCK) // max(self.numbers, 1))
        for start in range(0, self.examples, count):
            which = slice(start, start + count)
            rows = self.form(which)
            if sums.sqnorms is not None:
                sums.sqnorms[which] += row_sqnorms(rows)
            if sums.squares is not None:
                sums.squares.add_(rows.square().sum(0).view(sums.squares.shape))
            if sums.images is not None:
                sums.mapping.add_rows(sums.images[which], rows, sums.offset)


def formed(gradients: Tensor) -> Part:
    """Gradients (B, ...) that are there already."""
    flat = gradients.flatten(1)
    return Several(len(flat), flat.shape[1], lambda which: flat[which])


def of_linear(layer: nn.Linear, inputs: Tensor, deltas: Tensor) -> Parts:
    """The gradients of a linear layer: the sum over positions of delta a^T.

    ``inputs`` a are (B, ..., m), ``deltas``, the gradients of the outputs, (B, ..., n).
    """
    a, delta = (each.reshape(len(each), -1, each.shape[-1]) for each in (inputs, deltas))

    def form(which: slice) -> Tensor:
        return torch.bmm(delta[which].mT, a[which]).flatten(1)

    single = a.shape[1] == 1
    parts: Parts = {
        layer.weight: Outer(delta[:, 0], a[:, 0]) if single else Several(len(a), layer.weight.numel(), form)
    }
    if layer.bias is not None:
        parts[layer.bias] = formed(delta.sum(1))
    return parts


def of_convolution(layer: Conv, inputs: Tensor, deltas: Tensor) -> Parts:
    """The gradients of a convolution: the sum over images and positions of delta times what the kernel saw there.

    ``inputs`` are (B, [images,] channels, *sides), ``deltas``, the gradients of the outputs, likewise.
    """
    if inputs.dim() == layer.weight.dim():
        inputs, deltas = inputs.unsqueeze(1), deltas.unsqueeze(1)

    def form(which: slice) -> Tensor:
        gradients = of_images(layer, inputs[which].flatten(0, 1), deltas[which].flatten(0, 1))
        return gradients.view(-1, inputs.shape[1], layer.weight.numel()).sum(1)

    numbers = max(layer.weight.numel(), inputs[0].numel() * math.prod(layer.kernel_size[1:]))
    parts: Parts = {layer.weight: Several(len(inputs), numbers, form)}
    if layer.bias is not None:
        parts[layer.bias] = formed(deltas.flatten(3).sum((1, 3)))
    return parts


def of_images(layer: Conv, images: Tensor, deltas: Tensor) -> Tensor:
    """The flat gradient of a convolution's weight for each image (N, channels, *sides).

    What the kernel sees is laid out along all sides but the first, along which it is a view for each row of the kernel:
    a fraction of what would be copied otherwise.
    """
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    # Torch's own list: pairs from the last side to the first, also for padding "same" and "valid".
    seen = F.pad(images, layer._reversed_padding_repeated_twice, mode)
    (rows, step, apart), *others = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    for side, (kernel, stride, dilation) in enumerate(others, 3):
        seen = seen.unfold(side, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    end = 3 + len(others)
    seen = seen.permute(0, 1, *range(end, seen.dim()), *range(2, end))  # (N, channels, *kernel, side, *positions)
    groups, kernel, side = layer.groups, math.prod(layer.kernel_size[1:]), seen.shape[-1 - len(others)]
    channels, last = layer.in_channels // groups, step * (deltas.shape[2] - 1) + 1
    # Laid out here, once: the products would do it for every row of the kernel.
    seen = seen.reshape(len(images) * groups, channels * kernel, side, -1).contiguous()
    delta = deltas.reshape(len(images) * groups, layer.out_channels // groups, -1).mT
    found = [seen[:, :, at * apart : at * apart + last : step].flatten(2) @ delta for at in range(rows)]
    every = torch.stack(found, 1).view(len(seen), rows, channels, kernel, -1)
    return every.permute(0, 4, 2, 1, 3).reshape(len(images), -1)
