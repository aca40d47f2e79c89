"""What roles ask the probe for."""

from __future__ import annotations

import enum

__all__ = ["Need"]


class Need(enum.Enum):
    """What a role can ask the probe for."""

    VARIANCE = "variance"
    """Between-unit variance and mean gradient norm: :class:`~paceline.records.GradientStats` of rounds."""
    DIRECTION = "direction"
    """The part of the variance that is along the mean gradient: ``along`` of the statistics. Under AllReduce only."""
    OWN = "own"
    """The same of every worker's own gradient: ``measured`` and ``own_sqnorm`` of notes. Under LocalSGD only."""
    COORDINATES = "coordinates"
    """The variance of every coordinate: ``coordinates`` of rounds. Under AllReduce only; a second vector travels."""
    UNITS = "units"
    """The image of every unit's gradient in every step, for an order that learns from it.

    That is a :class:`~paceline.roles.Learner`.
    """
