"""The probe: what a run uses to see the gradient of each unit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import LoopError, SettingError
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

    @property
    def active(self) -> bool:
        """Whether anything is measured."""
        return self._meter is not None

    def attach(self, model: nn.Module, parameters: Sequence[nn.Parameter], needs: frozenset[Need]) -> None:
        """Begin to serve a run: measure the gradients of these parameters if anybody needs it."""
        if self._meter is not None:
            raise SettingError("this Probe serves another run that is not closed; make one for each run")
        self._layout = Layout(parameters)
        if not needs and not self.always:
            return
        if len({parameter.device for parameter in parameters}) > 1:
            raise SettingError("the probe needs all parameters on one device, but they are on several")
        keep = self.keep or self.exact
        if isinstance(self.unit, Example):
            module = model.module if isinstance(model, DistributedDataParallel) else model
            self._meter = ExampleMeter(module, self._layout, self._mapping(), keep, self.unit)
        else:
            self._meter = MicroBatchMeter(self._layout, self._mapping(), keep)

    def detach(self) -> None:
        """End to serve it."""
        self._meter = None

    def begin(self, micro_batches: int) -> None:
        """Begin a step in which this worker has so many micro-batches."""
        if self._meter is not None:
            self._meter.begin(micro_batches)

    def before(self, batch: Any) -> None:
        """See a micro-batch before the user's loop gets it."""
        if self._meter is not None:
            self._meter.before(batch)

    def before_backward(self) -> None:
        """Called just before the backward pass of a micro-batch: its ``zero_grad`` has been called by now."""
        if self._meter is not None:
            self._meter.before_backward()

    def see_bucket(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """See gradients that ``DistributedDataParallel`` is about to reduce: all micro-batches so far, own ones only.

        Called by the communication hook during the backward pass; ``.grad`` is not looked at for these then.
        """
        if self._meter is not None:
            self._meter.see_bucket(parameters, gradients)

    def after_backward(self, weight: float, factor: float) -> None:
        """Called after the backward pass, which added ``factor`` times the unit's gradient to ``.grad``.

        ``weight`` is what the unit stands for in the average: its examples, or what the user said.
        """
        if self._meter is not None:
            self._meter.after_backward(weight, factor)

    def numbers(self, collected: tuple[Sequence[Tensor], float] | None = None) -> tuple[int, float]:
        """What the note tells: the units of this step, and their sum of weight times squared gradient norm.

        ``collected`` is this worker's whole gradient in fewer tensors and what it was multiplied by, where the caller
        has laid it together.

        The sum is more accurate than that of :meth:`weights` times :meth:`sqnorms` where these are sketched
        (:func:`~paceline.probe.micro_batch.corrected_sqnorm`).
        """
        return (0, 0.0) if self._meter is None else self._meter.numbers(collected)

    def weights(self) -> Tensor:
        """The weights of this worker's units of the step."""
        return self._measuring().tally.weights()

    def sqnorms(self) -> Tensor:
        """The squared gradient norms of this worker's units of the step, from their sketches unless exact."""
        return self._measuring().tally.sqnorms()

    def gram(self) -> Tensor:
        """The inner products of the gradients of all pairs of this worker's units of the step."""
        return self._measuring().tally.gram()

    def mean_sqnorm(self, scale: float, gradients: Iterable[Tensor] | None = None) -> float:
        """Squared norm of the present ``.grad`` divided by ``scale``: exact, no sketch. NaN while not active.

        ``gradients`` are the same numbers in fewer tensors, where the caller has them.
        """
        if self._meter is None:
            return math.nan
        unscaled = float(norm(self._layout.gradients().values() if gradients is None else gradients)) / scale
        return unscaled * unscaled

    def _mapping(self) -> LinearMap:
        parameters = self._layout.parameters
        device = parameters[0].device if parameters else torch.device("cpu")
        double = any(parameter.dtype == torch.float64 for parameter in parameters)
        dtype = torch.float64 if double else torch.float32
        if self.exact:
            return Whole(self._layout.length, dtype=dtype, device=device)
        return SignSketch(self._layout.length, self.size, self.seed, dtype=dtype, device=device)

    def _measuring(self) -> MicroBatchMeter | ExampleMeter:
        if self._meter is None:
            raise LoopError("the probe measures nothing, since no role asks for it; write Probe(always=True)")
        return self._meter
