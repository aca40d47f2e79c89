"""Micro-batches as units: each one's gradient is what its backward pass adds to ``.grad``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from paceline.errors import LoopError
from paceline.probe.coordinates import Squares
from paceline.probe.norms import norm, sqnorm
from paceline.probe.preconditioned import Preconditioned
from paceline.probe.sketch import LinearMap
from paceline.probe.tally import Layout, Tally, Wanted

__all__ = ["MicroBatchMeter", "corrected_sqnorm"]


def corrected_sqnorm(
    weights: Tensor, factors: Tensor, sqnorms: Tensor, sum_sqnorm: float, image_sqnorm: float
) -> float:
    """Estimate sum_u w_u ||g_u||^2 from sketched norms, corrected by what is known exactly about the sum.

    ``sqnorms`` are the ||S(g_u)||^2 of the sketch S, and of v = sum_u f_u g_u (the ``.grad`` after the loop)
    both ||v||^2 (``sum_sqnorm``) and ||S(v)||^2 (``image_sqnorm``) are known::

        sum_u w_u ||S(g_u)||^2 + a (||v||^2 - ||S(v)||^2),   a = 1 / sum_u (f_u^2 / w_u)

    The correction has mean zero, so the estimate is unbiased for every a. With this one the sketched part,
    sum_u w_u ||g_u||^2 - a ||v||^2, is the part orthogonal to v in the sense of Cauchy and Schwarz (with f_u
    proportional to w_u: the spread sum_u w_u ||g_u - gbar||^2 within the worker), so the error of the sketch is
    relative to the spread alone. Without it, a strong mean gradient would drown the variance: 2 % of
    N ||gbar||^2 can be many times sigma^2.
    """
    correction = (sum_sqnorm - image_sqnorm) / (factors.square() / weights).sum()
    return float((weights * sqnorms).sum() + correction)


class MicroBatchMeter:
    """Takes the image of ``.grad`` between backward passes; the differences are the units.

    It holds the last image, and one number for each unit. A worker with a single micro-batch in a step needs no
    image at all: its norm is taken exactly, and only when it is asked for, since by then the gradient may have been
    laid together, where its norm costs half as much.
    """

    def __init__(self, layout: Layout, mapping: LinearMap, keep: bool, squares: Squares | None = None) -> None:
        self._tally = Tally(keep)
        self.squares = squares
        self._layout = layout
        self._mapping = mapping
        self.begin(0, Wanted(keep=keep))

    def begin(self, micro_batches: int, wanted: Wanted) -> None:
        """Forget the last step."""
        self._norms = wanted.norms
        self._tally.clear()
        self._tally.keep = wanted.keep
        self._squaring = self.squares if wanted.squares else None
        factors = wanted.factors
        self.preconditioned = None if factors is None else Preconditioned(self._layout, self._mapping, factors)
        self._late: tuple[float, float] | None = None
        self.whole = (0.0, 1.0)
        """The weight of this worker's gradient, and what the mean over it was multiplied by in ``.grad``."""
        self._micro_batches = micro_batches
        self._passes = 0
        self.adds_up = True  # whether .grad is the sum of the units: it began at zero
        self._last: Tensor | None = None
        self._sum: tuple[Tensor, Tensor] | None = None
        self._shown: set[nn.Parameter] = set()
        self._shown_norms: list[Tensor] = []
        self._shown_image: Tensor | None = None
        self._shown_gradients: dict[nn.Parameter, Tensor] = {}
        if self._squaring is not None:
            self._squaring.begin({})

    def before(self, batch: Any) -> None:
        """Nothing yet: the user may still zero the gradients."""

    def before_backward(self) -> None:
        """Look at ``.grad`` just before the first backward pass: it may hold zeros, or an earlier gradient."""
        if self._passes == self._micro_batches:
            raise LoopError(
                f"step.backward was called more than {self._micro_batches} times in a step of as many "
                "micro-batches; add the losses of one micro-batch up and call it once"
            )
        if self._passes == 0:
            gradients = self._layout.gradients()
            self.adds_up = not gradients or sqnorm(gradients.values()) == 0
            if self._wants_images and not self.adds_up:
                self._last = self._layout.image(self._mapping, gradients)
            if self._squaring is not None:
                self._squaring.begin(gradients)
            if self.preconditioned is not None and not self.adds_up:
                self.preconditioned.begin(gradients)

    def see_bucket(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """See gradients of the last backward pass before they are reduced: afterwards ``.grad`` is everybody's mean."""
        known = {
            parameter: gradient.detach()
            for parameter, gradient in zip(parameters, gradients, strict=True)
            if parameter in self._layout.offsets
        }
        self._shown.update(known)
        self._shown_norms.append(norm(known.values()))
        if self._squaring is not None or self.preconditioned is not None:
            self._shown_gradients.update((each, gradient.clone()) for each, gradient in known.items())
        if self._wants_images:
            image = self._layout.image(self._mapping, known)
            self._shown_image = image if self._shown_image is None else self._shown_image + image

    @property
    def tally(self) -> Tally:
        """What is known about the units so far."""
        self._settle(None)
        return self._tally

    def after_backward(self, weight: float, factor: float) -> None:
        """Count what this backward pass added to ``.grad`` as one unit: ``factor`` times its gradient."""
        self._passes += 1
        if weight:
            whole = self.whole[0] + weight
            self.whole = whole, whole * factor / weight
        if self._squaring is not None or self.preconditioned is not None:
            every = {**self._layout.gradients(), **self._shown_gradients}
            if self._squaring is not None:
                self._squaring.add_pass(every, weight, factor, more=self._passes < self._micro_batches)
            if self.preconditioned is not None:
                self.preconditioned.add_pass(every, weight, factor)
        if not (self._norms or self._tally.keep):
            if weight:
                self._tally.add(weight, 0.0, factor)
            return
        if not self._wants_images and not self._shown:
            self._late = weight, factor
            return
        last_pass = self._passes == self._micro_batches
        gradients = {each: grad for each, grad in self._layout.gradients().items() if each not in self._shown}
        total = norm([*self._shown_norms, *gradients.values()]) if self._norms and last_pass and self.adds_up else None
        image = None
        if self._wants_images:
            after = self._layout.image(self._mapping, gradients)
            if self._shown_image is not None:
                after += self._shown_image
            image = after if self._last is None else after - self._last
            self._last = after
            if total is not None:
                self._sum = total, norm([after])
        if weight == 0:
            return  # nothing was averaged in (a micro-batch of padding alone), so it says nothing
        scaled_norm = total if image is None else norm([image]) if self._norms else 0.0
        assert scaled_norm is not None
        self._tally.add(weight, scaled_norm, factor, image)

    def numbers(self, collected: tuple[Sequence[Tensor], float] | None = None) -> tuple[int, float]:
        """The number of units, and the sum over them of weight times squared gradient norm."""
        self._settle(collected)
        tally = self._tally
        if self._sum is None or not len(tally):
            return len(tally), tally.weighted_sqnorm()
        sum_norm, image_norm = map(float, self._sum)
        return len(tally), corrected_sqnorm(
            tally.weights(), tally.factors(), tally.sqnorms(), sum_norm * sum_norm, image_norm * image_norm
        )

    def own_sqnorm(self) -> float:
        """Of the mean of several units; NaN if ``.grad`` held something before them."""
        if self._sum is None:
            return math.nan
        length = float(self._sum[0]) / self.whole[1]
        return length * length

    def _settle(self, collected: tuple[Sequence[Tensor], float] | None) -> None:
        """Take the norm of a single unit, whose gradient is all that there is."""
        if self._late is None:
            return
        (weight, factor), self._late = self._late, None
        gradients, scale = collected or (self._layout.gradients().values(), 1.0)
        if weight:
            self._tally.add(weight, math.sqrt(sqnorm(gradients)), factor * scale)

    @property
    def _wants_images(self) -> bool:
        return self._tally.keep or (self._norms and (self._micro_batches != 1 or not self.adds_up))
