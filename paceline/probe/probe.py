"""The probe: what a run uses to see the gradient of each unit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.errors import LoopError, SettingError
from paceline.given import check_flags
from paceline.probe.coordinates import Squares
from paceline.probe.micro_batch import MicroBatchMeter
from paceline.probe.norms import sqnorm
from paceline.probe.per_example import ExampleMeter
from paceline.probe.sketch import SIZE, check_size, map_of
from paceline.probe.tally import Layout, Wanted
from paceline.probe.units import Example, MicroBatch, Unit
from paceline.roles import Need

__all__ = ["Probe"]

ONLY_UNITS = frozenset({Need.UNITS})


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
        check_flags("Probe: ", exact=exact, always=always, keep=keep)
        if exact and (size, seed) != (SIZE, 0):
            raise SettingError("exact=True makes no sketch, so size and seed have no effect; leave them out")
        self.size = size
        self.exact = exact
        self.unit = unit
        self.always = always
        self.keep = keep
        self.seed = seed
        self.optimizer: Optimizer | None = None
        """That of the run that it serves."""
        self._factors: Mapping[nn.Parameter, Tensor] | None = None
        self._layout = Layout([])
        self._meter: MicroBatchMeter | ExampleMeter | None = None
        self._measuring = self._partial = self._warned = False
        self.looking = False
        """Whether gradients of the present step are looked at: for statistics, or for an order alone."""
        self.within = False
        """Whether units are compared within each worker only, since each has data of its own. The run says so."""
        self.needs: frozenset[Need] = frozenset()
        """What the roles of the run that it serves ask for."""
        self.now: frozenset[Need] = frozenset()
        """What of that is looked at in the present step."""

    def __repr__(self) -> str:
        what = f"exact={self.exact}" if self.exact else f"size={self.size}, seed={self.seed}"
        return f"Probe({what}, unit={self.unit!r}, always={self.always}, keep={self.keep})"

    @property
    def active(self) -> bool:
        """Whether anything is measured in any step."""
        return self._meter is not None

    @property
    def measuring(self) -> bool:
        """Whether the present step is measured, for statistics."""
        return self._measuring

    @property
    def statistics(self) -> bool:
        """Whether statistics are measured in any step."""
        return self.active and (self.always or bool(self.needs - ONLY_UNITS))

    def attach(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        needs: frozenset[Need],
        optimizer: Optimizer | None = None,
    ) -> None:
        """Begin to serve a run: measure the gradients of these parameters if anybody needs it.

        Those that the optimizer does not have are left out, if one is given: nobody uses their gradients, or sets them
        to zero.
        """
        if self._meter is not None:
            raise SettingError("this Probe serves another run that is not closed; make one for each run")
        self._model, self.optimizer, self.needs, self._factors = model, optimizer, needs, None
        try:
            self._lay_out(parameters)
            if needs or self.always:
                self._begin_to_measure()
        except BaseException:
            self.detach()
            raise

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """These are trained now: some may have been frozen, thawed or given to the optimizer since the last step."""
        if self._state(parameters) == self._given:
            return
        if self.exact:
            raise SettingError(
                "parameters were frozen or thawed during a run with Probe(exact=True), which keeps whole gradients; "
                "make a new Run, or use sketches"
            )
        self._lay_out(parameters)
        self._begin_to_measure()

    def _lay_out(self, parameters: Sequence[nn.Parameter]) -> None:
        self._given = self._state(parameters)
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        updated = {id(each) for group in groups for each in group["params"]}
        seen = [each for each in parameters if self.optimizer is None or id(each) in updated]
        self._layout, self._partial = Layout(seen), len(seen) < len(parameters)

    def _state(self, parameters: Sequence[nn.Parameter]) -> tuple[list[int], int]:
        """Which parameters there are, and how many the optimizer has: it may be given more, and none is taken away."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [id(each) for each in parameters], sum(len(group["params"]) for group in groups)

    def _begin_to_measure(self) -> None:
        parameters = self._layout.parameters
        if len({parameter.device for parameter in parameters}) > 1:
            raise SettingError("the probe needs all parameters on one device, but they are on several")
        if any(parameter.is_complex() for parameter in parameters):
            raise SettingError(
                "the probe measures real gradients, but the model has complex parameters; hold their real and "
                "imaginary parts (torch.view_as_real) as the parameters, or use roles that measure nothing"
            )
        self.looking = self._measuring = True
        self.now = self.needs
        squares = Squares(self._layout) if Need.COORDINATES in self.needs else None
        self._map = map_of(parameters, None if self.exact else self.size, self.seed)
        if isinstance(self.unit, Example):
            module = self._model.module if isinstance(self._model, DistributedDataParallel) else self._model
            self._meter = ExampleMeter(module, self._layout, self._map, self._keeps, self.unit, squares)
        else:
            self._meter = MicroBatchMeter(self._layout, self._map, self._keeps, squares)

    @property
    def _keeps(self) -> bool:
        """Whether the images of all units of the step are needed, of their gradients themselves."""
        asked = {Need.DIRECTION} if self._factors is not None else {Need.DIRECTION, Need.UNITS}
        return self.keep or self.exact or bool(self.now & asked)

    def precondition(self, factors: Mapping[nn.Parameter, Tensor] | None) -> None:
        """From the next step on an order sees gradients times these, number by number; None for gradients themselves.

        Statistics stay those of gradients. A parameter without factors counts as zero.
        """
        self._factors = factors

    def detach(self) -> None:
        """End to serve it."""
        self._meter, self._measuring, self.looking = None, False, False

    def begin(self, micro_batches: int, needs: frozenset[Need] | None = frozenset(Need)) -> None:
        """Begin a step in which this worker has so many micro-batches.

        ``needs`` says what of that which roles ask for is looked at in this step; None for nothing at all.
        """
        self.looking = needs is not None and self._meter is not None
        self._measuring = self.looking and needs != ONLY_UNITS
        if self._meter is not None and needs is not None:
            self.now = needs & self.needs
            factors = self._factors if Need.UNITS in self.now else None
            squares = Need.COORDINATES in self.now
            self._meter.begin(micro_batches, Wanted(squares, self._keeps, self._measuring, factors))

    def before(self, batch: Any) -> None:
        """See a micro-batch before the user's loop gets it."""
        if self._meter is not None and self.looking:
            self._meter.before(batch)

    def before_backward(self) -> None:
        """Called just before the backward pass of a micro-batch: its ``zero_grad`` has been called by now."""
        if self._meter is not None and self.looking:
            self._meter.before_backward()

    def see_bucket(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """See gradients that ``DistributedDataParallel`` is about to reduce: all micro-batches so far, own ones only.

        Called by the communication hook during the backward pass; ``.grad`` is not looked at for these then.
        """
        if self._meter is not None and self.looking:
            self._meter.see_bucket(parameters, gradients)

    def after_backward(self, weight: float, factor: float) -> None:
        """Called after the backward pass, which added ``factor`` times the unit's gradient to ``.grad``.

        ``weight`` is what the unit stands for in the average: its examples, or what the user said.
        """
        if self._meter is not None and self.looking:
            self._meter.after_backward(weight, factor)

    def numbers(self, collected: tuple[Sequence[Tensor], float] | None = None) -> tuple[int, float]:
        """What the note tells: the units of this step, and their sum of weight times squared gradient norm.

        ``collected`` is this worker's whole gradient in fewer tensors and what it was multiplied by, where the caller
        has laid it together.

        The sum is more accurate than that of :meth:`weights` times :meth:`sqnorms` where these are sketched
        (:func:`~paceline.probe.micro_batch.corrected_sqnorm`).
        """
        if self._meter is None or not self._measuring:
            return 0, 0.0
        return self._meter.numbers(None if self._partial else collected)

    def mixed(self) -> bool:
        """Whether ``.grad`` held something before the step, which is then in the mean gradient and in no unit.

        It warns the first time: such a step has no statistics.
        """
        if self._meter is None or not self._measuring or self._meter.adds_up:
            return False
        if not self._warned:
            self._warned = True
            warnings.warn(
                "there were gradients in .grad when a step began, so the mean gradient is not that of its examples; "
                "such steps are left out of all statistics. Call optimizer.zero_grad() before the inner loop",
                stacklevel=2,
            )
        return True

    def own_sqnorm(self) -> float:
        """Squared norm of the mean gradient of this worker's units of the step; NaN where it is not known.

        To be called before anything is exchanged, but for what DDP exchanges in the backward pass.
        """
        return self._measuring_meter().own_sqnorm()

    def weights(self) -> Tensor:
        """The weights of this worker's units of the step."""
        return self._measuring_meter().tally.weights()

    def sqnorms(self) -> Tensor:
        """The squared gradient norms of this worker's units of the step, from their sketches unless exact."""
        return self._measuring_meter().tally.sqnorms()

    def gram(self) -> Tensor:
        """The inner products of the gradients of all pairs of this worker's units of the step."""
        return self._measuring_meter().tally.gram()

    def images(self) -> list[Tensor]:
        """The images of this worker's units of the step, but for those of weight zero, where they are kept."""
        return list(self._measuring_meter().tally.images())

    def order_images(self) -> list[Tensor]:
        """The same of what an order balances: gradients, or these times the factors of :meth:`precondition`."""
        preconditioned = self._measuring_meter().preconditioned
        return self.images() if preconditioned is None else preconditioned.images

    def mean_sqnorm(self, scale: float, gradients: Iterable[Tensor] | None = None) -> float:
        """Squared norm of the present ``.grad`` divided by ``scale``: exact, no sketch. NaN while not active.

        ``gradients`` are the same numbers in fewer tensors, where the caller has them.
        """
        if self._meter is None:
            return math.nan
        if gradients is None or self._partial:
            gradients = self._layout.gradients().values()
        return sqnorm(gradients, double=True) / (scale * scale)

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
        """What a sketch adds to a variance along one direction, as a part of the whole variance.

        About 1 / size for a long gradient; nothing where no two numbers share a bucket.
        """
        return 0.0 if self.exact else max(1.0 / self._map.size - 1.0 / max(self._layout.length, 1), 0.0)

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
        return weight, image, sqnorm(gradients.values()) / (factor * factor)

    @property
    def image_size(self) -> int:
        """How many numbers an image has."""
        return self._map.size

    def _measuring_meter(self) -> MicroBatchMeter | ExampleMeter:
        if self._meter is None:
            raise LoopError("the probe measures nothing, since no role asks for it; write Probe(always=True)")
        return self._meter
