"""The gradients of one parameter for all examples of a chunk, formed for a few of them at a time, or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.probe.norms import row_sqnorms
from paceline.probe.sketch import LinearMap

__all__ = ["Conv", "Geometry", "Part", "Sums", "formed", "of_convolution", "of_linear", "times", "total"]

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

    @property
    def examples(self) -> int:
        """How many there are."""

    @property
    def numbers(self) -> int:
        """How many it takes to form one."""

    def form(self, which: slice) -> Tensor:
        """The flat gradients of some examples, one a row."""

    def add_to(self, sums: Sums) -> None:
        """Add what is wanted of them."""


@dataclass(frozen=True)
class Outer:
    """Outer products delta a^T, of which nothing has to be formed but images without numba."""

    deltas: Tensor  # (B, n)
    inputs: Tensor  # (B, m)

    @property
    def examples(self) -> int:
        """How many there are."""
        return len(self.deltas)

    @property
    def numbers(self) -> int:
        """How many one has."""
        return self.deltas.shape[1] * self.inputs.shape[1]

    def form(self, which: slice) -> Tensor:
        """The products themselves, flat."""
        return (self.deltas[which].unsqueeze(2) * self.inputs[which].unsqueeze(1)).flatten(1)

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
    form: Callable[[slice], Tensor]

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


def total(parts: Sequence[Part]) -> Part:
    """The sums of what several uses of a parameter give. Norms of sums are no sums of norms, so these are formed."""
    if len(parts) == 1:
        return parts[0]

    def form(which: slice) -> Tensor:
        first, *others = (part.form(which) for part in parts)
        return sum(others, first)

    return Several(parts[0].examples, sum(part.numbers for part in parts), form)


def times(part: Part, factors: Tensor) -> Part:
    """The gradients times factors, number by number: outer products are none any more, so all of them are formed."""
    return Several(part.examples, part.numbers, lambda which: part.form(which) * factors.flatten())


def formed(gradients: Tensor) -> Part:
    """Gradients (B, ...) that are there already."""
    flat = gradients.unsqueeze(1).flatten(1)
    return Several(len(flat), flat.shape[1], lambda which: _wide(flat[which]))


def of_linear(inputs: Tensor, deltas: Tensor) -> Part:
    """The gradients of a linear layer's weight: the sum over positions of delta a^T.

    ``inputs`` a are (B, ..., m), ``deltas``, the gradients of the outputs, (B, ..., n).
    """
    a, delta = (_wide(each).unsqueeze(1).flatten(1, -2) for each in (inputs.to(deltas.dtype), deltas))
    if a.shape[1] == 1:
        return Outer(delta[:, 0], a[:, 0])
    return Several(len(a), a.shape[2] * delta.shape[2], lambda which: torch.bmm(delta[which].mT, a[which]).flatten(1))


@dataclass(frozen=True)
class Geometry:
    """How a convolution goes over its input: what its layer said when it was called."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    margins: tuple[int, ...]
    """Pairs from the last side to the first, as ``F.pad`` takes them."""
    mode: str

    @classmethod
    def of(cls, layer: Conv) -> Geometry:
        """Ask a layer."""
        kernel, dilation = tuple(layer.weight.shape[2:]), layer.dilation
        mode, margins = "constant", tuple(layer._reversed_padding_repeated_twice)
        if layer.padding_mode != "zeros":
            mode = layer.padding_mode
        elif not isinstance(layer.padding, str):
            margins = tuple(side for side in reversed(layer.padding) for _ in range(2))
        return cls(kernel, layer.stride, dilation, layer.groups, margins, mode)


def of_convolution(how: Geometry, inputs: Tensor, deltas: Tensor) -> Part:
    """The gradients of a convolution's weight: the sum over positions of delta times what the kernel saw there.

    ``inputs`` are (B, images, channels, *sides), ``deltas``, the gradients of the outputs, likewise.
    """
    images, gradients = _wide(inputs.to(deltas.dtype)), _wide(deltas)
    numbers = deltas.shape[2] * inputs.shape[2] // how.groups * math.prod(how.kernel)

    def form(which: slice) -> Tensor:
        some = images[which]
        each = of_images(how, some.flatten(0, 1), gradients[which].flatten(0, 1))
        return each.view(len(some), some.shape[1], numbers).sum(1)

    return Several(len(images), max(numbers, images[0].numel() * math.prod(how.kernel)), form)


def of_images(how: Geometry, images: Tensor, deltas: Tensor) -> Tensor:
    """The flat gradient of a convolution's weight for each image (N, channels, *sides), by one product."""
    seen = F.pad(images, how.margins, how.mode)
    for side, (kernel, stride, dilation) in enumerate(zip(how.kernel, how.stride, how.dilation, strict=True), 2):
        seen = seen.unfold(side, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    end = 2 + len(how.kernel)
    seen = seen.permute(0, 1, *range(end, seen.dim()), *range(2, end))  # (N, channels, *kernel, *positions)
    count = len(images) * how.groups
    places = math.prod(deltas.shape[2:])
    seen = seen.reshape(count, images.shape[1] // how.groups * math.prod(how.kernel), places)
    delta = deltas.reshape(count, deltas.shape[1] // how.groups, places)
    return torch.bmm(delta, seen.mT).flatten(1).reshape(len(images), delta.shape[1] * how.groups * seen.shape[1])


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
