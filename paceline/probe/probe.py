"""The probe: what a run uses to see the gradient of each unit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import LoopError, SettingError
from paceline.probe.coordinates import Squares
from paceline.probe.micro_batch import MicroBatchMeter
from paceline.probe.norms import norm
from paceline.probe.per_example import ExampleMeter
from paceline.probe.sketch import SIZE, LinearMap, SignSketch, Whole, check_size
from paceline.probe.tally import Layout
from paceline.probe.units import Example, MicroBatch, Unit
from paceline.roles import Need

__all__ = ["Probe"]


class Probe:
    """Measures the gradients of units (micro-batches, or single examples) while the user's loop runs.

    ``size``
        Numbers in a sketch: the relative error of an inner product is about ``sqrt(2 / size)``.
    ``exact``
        Keep every unit's gradient itself instead of a sketch: as much memory for each as for the gradient.
    ``unit``
        :class:`MicroBatch` (default), or :class:`Example` for per-example gradients.
    ``always``
        Measure even if no role asks for it, so that the record has the statistics.
    ``keep``
        Keep the sketches of all units of a step, so that :meth:`gram` can be asked for. Otherwise only their
        norms are kept, which is all that a variance needs.
    ``seed``
        Of the random signs.

    A run calls :meth:`attach` once, then in each step :meth:`begin`, and for each micro-batch :meth:`before`,
    :meth:`before_backward` and :meth:`after_backward`. As long as nobody needs a measurement, nothing is done.
    """

    def __init__(
        self,
        *,
        size: int = SIZE,
        exact: bool = False,
        unit: Unit = MicroBatch(),  # noqa: B008 (it is frozen)
        always: bool = False,
        keep: bool = False,
        seed: int = 0,
    ) -> None:
        check_size(size)
        if exact and (size, seed) != (SIZE, 0):
            raise SettingError("exact=True makes no sketch, so size and seed have no effect; leave them out")
        self.size = size
        self.exact = exact
        self.unit = unit
        self.always = always
        self.keep = keep
        self.seed = seed
        self._layout = Layout([])
        self._meter: MicroBatchMeter | ExampleMeter | None = None
        self._measuring = False
        self.needs: frozenset[Need] = frozenset()
        """What the roles of the run that it serves ask for."""

    @property
    def active(self) -> bool:
        """Whether anything is measured in any step."""
        return self._meter is not None

    @property
    def measuring(self) -> bool:
        """Whether the present step is measured."""
        return self._measuring

    def attach(self, model: nn.Module, parameters: Sequence[nn.Parameter], needs: frozenset[Need]) -> None:
        """Begin to serve a run: measure the gradients of these parameters if anybody needs it."""
        if self._meter is not None:
            raise SettingError("this Probe serves another run that is not closed; make one for each run")
        self._layout, self.needs = Layout(parameters), needs
        if not needs and not self.always:
            return
        if len({parameter.device for parameter in parameters}) > 1:
            raise SettingError("the probe needs all parameters on one device, but they are on several")
        self._measuring = True
        keep = self.keep or self.exact or Need.DIRECTION in needs
        squares = Squares(self._layout) if Need.COORDINATES in needs else None
        self._map = self._mapping()
        if isinstance(self.unit, Example):
            module = model.module if isinstance(model, DistributedDataParallel) else model
            self._meter = ExampleMeter(module, self._layout, self._map, keep, self.unit, squares)
        else:
            self._meter = MicroBatchMeter(self._layout, self._map, keep, squares)

    def detach(self) -> None:
        """End to serve it."""
        self._meter, self._measuring = None, False

    def begin(self, micro_batches: int, measure: bool = True) -> None:
        """Begin a step in which this worker has so many micro-batches; ``measure`` says whether to look at it."""
        self._measuring = measure and self._meter is not None
        if self._meter is not None and measure:
            self._meter.begin(micro_batches)

    def before(self, batch: Any) -> None:
        """See a micro-batch before the user's loop gets it."""
        if self._meter is not None and self._measuring:
            self._meter.before(batch)

    def before_backward(self) -> None:
        """Called just before the backward pass of a micro-batch: its ``zero_grad`` has been called by now."""
        if self._meter is not None and self._measuring:
            self._meter.before_backward()

    def see_bucket(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """See gradients that ``DistributedDataParallel`` is about to reduce: all micro-batches so far, own ones only.

        Called by the communication hook during the backward pass; ``.grad`` is not looked at for these then.
        """
        if self._meter is not None and self._measuring:
            self._meter.see_bucket(parameters, gradients)

    def after_backward(self, weight: float, factor: float) -> None:
        """Called after the backward pass, which added ``factor`` times the unit's gradient to ``.grad``.

        ``weight`` is what the unit stands for in the average: its examples, or what the user said.
        """
        if self._meter is not None and self._measuring:
            self._meter.after_backward(weight, factor)

    def numbers(self, collected: tuple[Sequence[Tensor], float] | None = None) -> tuple[int, float]:
        """What the note tells: the units of this step, and their sum of weight times squared gradient norm.

        ``collected`` is this worker's whole gradient in fewer tensors and what it was multiplied by, where the caller
        has laid it together.

        The sum is more accurate than that of :meth:`weights` times :meth:`sqnorms` where these are sketched
        (:func:`~paceline.probe.micro_batch.corrected_sqnorm`).
        """
        return self._meter.numbers(collected) if self._meter is not None and self._measuring else (0, 0.0)

    def weights(self) -> Tensor:
        """The weights of this worker's units of the step."""
        return self._measuring_meter().tally.weights()

    def sqnorms(self) -> Tensor:
        """The squared gradient norms of this worker's units of the step, from their sketches unless exact."""
        return self._measuring_meter().tally.sqnorms()

    def gram(self) -> Tensor:
        """The inner products of the gradients of all pairs of this worker's units of the step."""
        return self._measuring_meter().tally.gram()

    def mean_sqnorm(self, scale: float, gradients: Iterable[Tensor] | None = None) -> float:
        """Squared norm of the present ``.grad`` divided by ``scale``: exact, no sketch. NaN while not active.

        ``gradients`` are the same numbers in fewer tensors, where the caller has them.
        """
        if self._meter is None:
            return math.nan
        unscaled = float(norm(self._layout.gradients().values() if gradients is None else gradients)) / scale
        return unscaled * unscaled

    def towards_mean(self, scale: float) -> tuple[float, float]:
        """Sums over this worker's units of weight times <g_u, gbar>, and times its square, from sketches unless exact.

        ``.grad`` holds ``scale`` times the mean gradient gbar of all workers by now.
        """
        tally = self._measuring_meter().tally
        if not len(tally):
            return 0.0, 0.0
        mean = self._layout.image(self._map, self._layout.gradients()).double() / scale
        weights, products = tally.weights(), (tally.images().double() @ mean).cpu()
        return float((weights * products).sum()), float((weights * products.square()).sum())

    @property
    def blur(self) -> float:
        """What a sketch adds to a variance along one direction, as a part of the whole variance: 1 / size, or 0."""
        return 0.0 if self.exact else 1.0 / self._map.size

    def squares(self) -> list[Tensor]:
        """For each parameter, the sum over this worker's units of weight times squared gradient."""
        squares = self._measuring_meter().squares
        assert squares is not None, "no role asks for coordinates"
        return [squares.sums[each] for each in self._layout.parameters]

    def mean(self, scale: float) -> list[Tensor]:
        """For each parameter, ``.grad`` over ``scale``; zeros where there is none."""
        found = self._layout.gradients()
        return [found[each] / scale if each in found else torch.zeros_like(each) for each in self._layout.parameters]

    def own_mean(self) -> tuple[float, Tensor, float]:
        """Of this worker's own mean gradient in ``.grad``: the weight, the image and the squared norm.

        To be called before anything is exchanged or changed in ``.grad``.
        """
        weight, factor = self._measuring_meter().whole
        gradients = self._layout.gradients()
        if not weight:
            return 0.0, torch.zeros(self._map.size), 0.0
        image = self._layout.image(self._map, gradients) / factor
        length = float(norm(gradients.values())) / factor
        return weight, image, length * length

    @property
    def image_size(self) -> int:
        """How many numbers an image has."""
        return self._map.size

    def _mapping(self) -> LinearMap:
        parameters = self._layout.parameters
        device = parameters[0].device if parameters else torch.device("cpu")
        double = any(parameter.dtype == torch.float64 for parameter in parameters)
        dtype = torch.float64 if double else torch.float32
        if self.exact:
            return Whole(self._layout.length, dtype=dtype, device=device)
        return SignSketch(self._layout.length, self.size, self.seed, dtype=dtype, device=device)

    def _measuring_meter(self) -> MicroBatchMeter | ExampleMeter:
        if self._meter is None:
            raise LoopError("the probe measures nothing, since no role asks for it; write Probe(always=True)")
        return self._meter
