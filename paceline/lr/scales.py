"""What a rule's factor multiplies."""

from __future__ import annotations

import enum
from typing import Protocol, runtime_checkable

__all__ = ["Scales", "Scaling"]


class Scales(enum.Enum):
    """What the factor of a learning-rate rule multiplies in a step of the optimizer.

    For plain SGD both are the same. They differ for optimizers that divide by the gradients of the past; with momentum,
    while the factor changes.
    """

    RATE = "rate"
    """The learning rate, of all parameter groups."""
    GRADIENT = "gradient"
    """The gradient, and weight decay with it, so that the optimizer's sums of squares take the factor squared.

    That is right for AdaGrad: a step that is worth r steps of the base batch adds as much to them as those r would.
    """


@runtime_checkable
class Scaling(Protocol):
    """A rule that says what its factor multiplies; for others it is the learning rate."""

    scales: Scales
    """The same in every step."""
