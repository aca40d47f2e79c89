"""Squares of every coordinate of the units' gradients: what the variance of each coordinate is made of."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paceline.probe.tally import Layout

__all__ = ["Squares", "coordinate_variances"]


class Squares:
    """The sum over units of weight times squared gradient, for each coordinate: as long as the gradient.

    A unit's gradient is what its backward pass adds to ``.grad``, of which a copy is kept in between.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._last: dict[nn.Parameter, Tensor] = {}
        self.sums: dict[nn.Parameter, Tensor] = {}

    def begin(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """A step begins with these in ``.grad``."""
        self._last = {each: gradient.detach().clone() for each, gradient in gradients.items()}
        self.sums = {each: torch.zeros_like(each, dtype=_wide(each.dtype)) for each in self._layout.parameters}

    @torch.no_grad()
    def add_pass(self, gradients: Mapping[nn.Parameter, Tensor], weight: float, factor: float, more: bool) -> None:
        """A backward pass has added ``factor`` times a unit's gradient; ``more`` says whether another one follows."""
        for parameter, gradient in gradients.items():
            last = self._last.get(parameter)
            self._add(parameter, gradient if last is None else gradient - last, weight, factor)
        self._last = {each: gradient.detach().clone() for each, gradient in gradients.items()} if more else {}

    def _add(self, parameter: nn.Parameter, change: Tensor, weight: float, factor: float) -> None:
        if weight:
            wide = change.to(self.sums[parameter].dtype)
            self.sums[parameter].addcmul_(wide, wide, value=weight / (factor * factor))


def coordinate_variances(squares: Tensor, mean: Tensor, units: int, weight: float) -> Tensor:
    """For each coordinate (sum_u n_u g_u^2 - N gbar^2) / (U - 1), which is unbiased for any grouping; at least 0."""
    return ((squares - weight * mean.square()) / (units - 1)).clamp_min(0.0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
