"""What is known about the units of one step on one worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import LoopError, SettingError
from paceline.probe.norms import inner_products
from paceline.probe.sketch import LinearMap

__all__ = ["Layout", "Tally", "Wanted"]


class Wanted(NamedTuple):
    """What is measured of a step, besides the weights of its units."""

    squares: bool = False
    """Squares of coordinates, in sums."""
    keep: bool = False
    """The images of all units."""
    norms: bool = True
    factors: Mapping[nn.Parameter, Tensor] | None = None
    """If there are some: images of gradients times these, too."""


class Layout:
    """Where each parameter sits in the flat gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.offsets: dict[nn.Parameter, int] = {}
        self.length = 0
        for parameter in self.parameters:
            self.offsets[parameter] = self.length
            self.length += parameter.numel()

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """The gradients that there are: a parameter without one counts as zero everywhere."""
        found = {each: gradient for each in self.parameters if (gradient := each.grad) is not None}
        if any(gradient.is_sparse for gradient in found.values()):
            raise SettingError(
                "a parameter has a sparse gradient, which the probe cannot measure; build its layer with sparse=False"
            )
        return found

    def image(self, mapping: LinearMap, gradients: dict[nn.Parameter, Tensor]) -> Tensor:
        """The image of the flat gradient that is made of these."""
        return mapping.of(list(gradients.values()), [self.offsets[each] for each in gradients])


class Tally:
    """A few numbers for each unit of a step, and its image where these are kept.

    Norms stay on their device until they are asked for, so that no micro-batch waits for a GPU.
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self._weights: list[float] = []
        self._factors: list[float] = []
        self._norms: list[Tensor | float] = []
        self._images: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._weights)

    def add(self, weight: float, scaled_norm: Tensor | float, factor: float = 1.0, image: Tensor | None = None) -> None:
        """Take a unit, given the norm (and the image) of ``factor`` times its gradient."""
        self._weights.append(weight)
        self._factors.append(factor)
        self._norms.append(scaled_norm)
        if self.keep and image is not None:
            self._images.append(image if factor == 1 else image / factor)

    def weights(self) -> Tensor:
        """The weight of each unit."""
        return torch.tensor(self._weights, dtype=torch.float64)

    def factors(self) -> Tensor:
        """What each unit's gradient was multiplied by."""
        return torch.tensor(self._factors, dtype=torch.float64)

    def sqnorms(self) -> Tensor:
        """The squared norm of each unit's gradient."""
        norms = torch.tensor([float(each) for each in self._norms], dtype=torch.float64)
        return (norms / self.factors()).square()

    def weighted_sqnorm(self) -> float:
        """The sum over units of weight times squared norm."""
        total = 0.0
        for weight, factor, scaled_norm in zip(self._weights, self._factors, self._norms, strict=True):
            norm = float(scaled_norm) / factor
            total += weight * norm * norm
        return total

    def images(self) -> Tensor:
        """The image of each unit's gradient, one a row."""
        if not self.keep:
            raise LoopError(
                "the sketches of all units are asked for, but only their norms were kept; "
                "write Probe(keep=True), or Probe(exact=True) for the gradients themselves"
            )
        return torch.stack(self._images) if self._images else torch.zeros(0, 0)

    def gram(self) -> Tensor:
        """The inner products of all pairs of unit gradients."""
        images = self.images()
        return inner_products(images) if len(images) else torch.zeros(0, 0, dtype=torch.float64)
