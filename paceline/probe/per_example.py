"""Single examples as units: their gradients come from ``torch.func``, not from the user's backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from paceline.errors import LoopError, SettingError
from paceline.probe.collated import Batch
from paceline.probe.coordinates import Squares
from paceline.probe.norms import sqnorm
from paceline.probe.one_by_one import OneByOne
from paceline.probe.parts import Part, Sums
from paceline.probe.preconditioned import Preconditioned
from paceline.probe.sketch import LinearMap
from paceline.probe.tally import Layout, Tally, Wanted
from paceline.probe.units import Example

__all__ = ["ExampleMeter", "check_layers"]


def check_layers(module: nn.Module) -> None:
    """Refuse a module in whose present mode one example's gradient depends on the others.

    ``BatchNorm`` uses statistics of the batch in training mode, and always where it has no running ones.
    """
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            raise SettingError(
                f"layer {name!r} ({kind}) mixes the examples of a batch, so one example has no gradient of its "
                "own; use GroupNorm instead, or measure micro-batches: Probe(unit=MicroBatch())"
            )
        if isinstance(layer, _InstanceNorm) and layer.training and layer.track_running_stats:
            raise SettingError(
                f"layer {name!r} ({kind}) updates running statistics, which cannot be done for single examples; "
                "write track_running_stats=False, or measure micro-batches: Probe(unit=MicroBatch())"
            )


class ExampleMeter:
    """Computes each example's gradient before the user's own forward pass; the norms are exact."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        mapping: LinearMap,
        keep: bool,
        unit: Example,
        squares: Squares | None = None,
    ) -> None:
        check_layers(module)
        names = {parameter: name for name, parameter in module.named_parameters()}
        missing = sum(parameter not in names for parameter in layout.parameters)
        if missing:
            raise SettingError(
                f"{missing} of {len(layout.parameters)} parameters do not belong to the model, so Example cannot "
                "differentiate by them; pass parameters of the model, or use Probe(unit=MicroBatch())"
            )
        self.tally = Tally(keep)
        self.squares = self._squaring = squares
        self.whole = (0.0, 1.0)
        """The weight of this worker's gradient, and what the mean over it was multiplied by in ``.grad``."""
        self._module = module
        self._parameters = {names[each]: each for each in layout.parameters}
        self._gradients = OneByOne(module, self._parameters, unit.loss, unit.chunk_size)
        device = layout.parameters[0].device if layout.parameters else torch.device("cpu")
        self._device, self._accelerators = device, [] if device.type == "cpu" else [device]
        self._layout = layout
        self._mapping = mapping
        self._limit = unit.chunk_size * layout.length
        self._length = 0
        self._norms = self.adds_up = True
        self.preconditioned: Preconditioned | None = None

    def begin(self, micro_batches: int, wanted: Wanted) -> None:
        """Forget the last step."""
        self._norms = wanted.norms
        self.tally.clear()
        self.tally.keep = wanted.keep
        self.whole = (0.0, 1.0)
        self._squaring = self.squares if wanted.squares else None
        factors = wanted.factors
        self.preconditioned = None if factors is None else Preconditioned(self._layout, self._mapping, factors)
        if self._squaring is not None:
            self._squaring.begin({})

    def before(self, batch: Any) -> None:
        """Measure the gradient of each example of the micro-batch that comes next."""
        check_layers(self._module)  # train() or eval() may have been called since attach
        whole = Batch.of(batch)
        self._length = whole.length
        if (
            self._gradients.untried and whole.length > 1
        ):  # in a run that was resumed, too, and nothing that is measured may depend on it
            with self._aside():
                self._gradients.learn(whole)
        with self._aside():
            for examples, parts in self._gradients.of(whole):
                with torch.autocast(self._device.type, enabled=False):  # what was found is not to be rounded again
                    self._take(parts, examples)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Dropout must draw the same numbers in the user's forward pass as if nothing were measured."""
        kind = self._accelerators[0].type if self._accelerators else "cuda"
        with torch.random.fork_rng(self._accelerators, device_type=kind):
            try:
                yield
            except RuntimeError as error:
                error.add_note("(in per-example gradients; a model that cannot have them needs unit=MicroBatch())")
                raise

    @torch.no_grad()
    def _take(self, parts: Mapping[str, Part], examples: int) -> None:
        """Count the examples of a chunk as units."""
        mapping = self._mapping
        images = self._blank(examples) if self.tally.keep else None
        sqnorms = None
        if self._norms:
            sqnorms = torch.zeros(examples, dtype=torch.float64, device=self._device)
        for name, part in parts.items() if self._norms or self.tally.keep else ():
            parameter = self._parameters[name]
            squares = None if self._squaring is None else self._squaring.sums[parameter]
            part.add_to(Sums(images, sqnorms, squares, mapping, self._layout.offsets[parameter], self._limit))
        if self.preconditioned is not None:
            named = {self._parameters[name]: part for name, part in parts.items()}
            self.preconditioned.add_examples(named, self._blank(examples), self._limit)
        norms = None if sqnorms is None else sqnorms.sqrt()
        for number in range(examples):
            image = None if images is None else images[number]
            self.tally.add(1.0, 0.0 if norms is None else norms[number], image=image)

    def _blank(self, examples: int) -> Tensor:
        return torch.zeros(examples, self._mapping.size, dtype=self._mapping.dtype, device=self._device)

    def before_backward(self) -> None:
        """See whether ``.grad`` will be of this step's examples alone."""
        if not self.whole[0]:
            self.adds_up = sqnorm(self._layout.gradients().values()) == 0

    def see_bucket(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """Nothing: the buckets are not needed."""

    def after_backward(self, weight: float, factor: float) -> None:
        """Make sure that the micro-batch weighs what its examples do."""
        if weight != self._length:
            raise LoopError(
                f"step.backward got weight {weight:g} for {self._length} examples, but with unit=Example each "
                "example weighs 1; leave the weight out, or measure micro-batches: Probe(unit=MicroBatch())"
            )
        self.whole = self.whole[0] + weight, (self.whole[0] + weight) * factor / weight

    def own_sqnorm(self) -> float:
        """Of the mean of all examples, which the user's passes have left in ``.grad``; NaN if there was more in it."""
        return sqnorm(self._layout.gradients().values()) / self.whole[1] ** 2 if self.adds_up else math.nan

    def numbers(self, collected: tuple[Sequence[Tensor], float] | None = None) -> tuple[int, float]:
        """The number of units, and the sum over them of weight times squared gradient norm."""
        return len(self.tally), self.tally.weighted_sqnorm()
