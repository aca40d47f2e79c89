"""AdaScale: the learning rate grows as much as a larger batch is worth."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from paceline.batch.fixed import check_size
from paceline.errors import SettingError
from paceline.given import check_numbers
from paceline.lr.scales import Scales
from paceline.probe.moving import Moments
from paceline.records import Progress, Round
from paceline.roles import Need

__all__ = ["AdaScale", "gain"]


def gain(variance: float, signal: float, base: float, batch: float) -> float:
    """How many steps of batch ``base`` a step of ``batch`` is worth (Johnson et al. 2020, equation 3)::

        (variance / base + signal) / (variance / batch + signal)

    With ``variance`` of one example's gradient and ``signal``, the squared norm of the true gradient. It lies between 1
    and the scale S = batch / base: 1 where there is no noise, S where there is nothing else.
    """
    if variance <= 0 or signal < 0:
        return 1.0
    return (variance / base + signal) / (variance / batch + signal)


@dataclass
class AdaScale:
    """Multiplies the learning rate, or the gradient, by the gain of the present batch over the batch ``base``.

    The optimizer's settings are those for ``base``. A gradient times its gain r has r times the squared length that
    those of ``base`` have, in the mean. So where the gradient is what is multiplied, an optimizer that adds up squares,
    as AdaGrad does, has the sums of r steps after one.

    Gains add up to :attr:`steps`, the number of steps of batch ``base`` that the training is worth so far: schedules
    belong to that count (:class:`~paceline.lr.Pace`). Momentum stays as it is. The estimates of the step before are
    used; before the first, the gain is 1.

    Args:
        base: the batch that the learning rate is for.
        smoothing: of the moving averages; None for the paper's 1 - S / 1000, and at least 0.
        power: what the gain is raised to; 0.5 is in use for Adam, of which the paper says nothing.
        scales: what is multiplied: the rate, as in the paper, or the gradient, for AdaGrad and ``optim.AdaGradNorm``.
    """

    base: int
    smoothing: float | None = None
    power: float = 1.0
    scales: Scales = Scales.RATE

    needs: ClassVar[frozenset[Need]] = frozenset({Need.VARIANCE})

    steps: float = field(init=False, repr=False, compare=False, default=0.0)
    """Scale-invariant steps done: those that the optimizer has done, each with its gain."""
    _moments: Moments = field(init=False, repr=False, compare=False, default_factory=Moments)
    _example_weight: float = field(init=False, repr=False, compare=False, default=1.0)

    def __post_init__(self) -> None:
        check_numbers(self)
        check_size("AdaScale: base", self.base)
        if self.smoothing is not None and not 0 <= self.smoothing < 1:
            raise SettingError(f"AdaScale: smoothing ({self.smoothing}) must be at least 0 and below 1")
        if not 0 < self.power <= 1:
            raise SettingError(f"AdaScale: power ({self.power}) must be above 0 and at most 1")
        if not isinstance(self.scales, Scales):
            raise SettingError(f"AdaScale: scales ({self.scales!r}) must be lr.Scales.RATE or lr.Scales.GRADIENT")

    def due(self, progress: Progress) -> bool:
        """It learns from every step."""
        return True

    def gain(self, batch: int) -> float:
        """Of a batch of so many examples, by what is known now."""
        if not self._moments.known:
            return 1.0
        weight = self._example_weight
        return gain(self._moments.variance, self._moments.signal, self.base * weight, batch * weight)

    def factor(self, progress: Progress, batch: int) -> float:
        """The gain, raised to ``power``."""
        return math.pow(self.gain(batch), self.power)

    def stepped(self, batch: int, steps: int) -> None:
        """Count what the steps were worth, with the gain that was applied."""
        self.steps += steps * self.gain(batch)

    def observe(self, round: Round) -> None:
        """Learn from a round."""
        examples = sum(note.examples for note in round.notes)
        if round.stats is None or not examples:
            return
        scale = round.plan.batch / self.base
        smoothing = max(1.0 - scale / 1000, 0.0) if self.smoothing is None else self.smoothing
        if self._moments.add(round.stats, smoothing):
            self._example_weight = round.weight / examples

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"steps": self.steps, "moments": self._moments.state_dict(), "example_weight": self._example_weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self.steps, self._example_weight = state["steps"], state["example_weight"]
        self._moments.load_state_dict(state["moments"])
