"""Images of units' gradients times given factors, number by number: what a preconditioned order balances."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paceline.probe.parts import Part, Sums, times
from paceline.probe.sketch import LinearMap
from paceline.probe.tally import Layout

__all__ = ["Preconditioned"]


class Preconditioned:
    """The images of a step's units, beside those of their gradients themselves, which statistics are made of.

    Nothing is written to ``.grad``. A parameter without factors counts as zero.
    """

    def __init__(self, layout: Layout, mapping: LinearMap, factors: Mapping[nn.Parameter, Tensor]) -> None:
        self._layout, self._mapping, self._factors = layout, mapping, factors
        self.images: list[Tensor] = []
        self._last: Tensor | None = None

    def begin(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """A step begins with these in ``.grad``."""
        self._last = self._image(gradients)

    def add_pass(self, gradients: Mapping[nn.Parameter, Tensor], weight: float, factor: float) -> None:
        """A backward pass has added ``factor`` times a unit's gradient, which says nothing if it weighs nothing."""
        after, before = self._image(gradients), self._last
        self._last = after
        if weight:
            self.images.append((after if before is None else after - before) / factor)

    def add_examples(self, parts: Mapping[nn.Parameter, Part], images: Tensor, limit: int) -> None:
        """These are the gradients of several examples; ``images`` are zeros, a row for each of them."""
        for parameter, part in parts.items():
            if parameter in self._factors:
                offset = self._layout.offsets[parameter]
                times(part, self._factors[parameter]).add_to(Sums(images, None, None, self._mapping, offset, limit))
        self.images += images

    @torch.no_grad()
    def _image(self, gradients: Mapping[nn.Parameter, Tensor]) -> Tensor:
        products = {each: grad * self._factors[each] for each, grad in gradients.items() if each in self._factors}
        return self._layout.image(self._mapping, products)
