"""Single examples as units: their gradients come from ``torch.func``, not from the user's backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

from paceline.errors import LoopError, SettingError
from paceline.probe.coordinates import Squares
from paceline.probe.norms import norm, sqnorm
from paceline.probe.sketch import LinearMap
from paceline.probe.tally import Layout, Tally
from paceline.probe.units import Example, Loss

__all__ = ["ExampleMeter", "check_layers", "per_example_gradients"]


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


def per_example_gradients(
    module: nn.Module, parameters: dict[str, Tensor], loss: Loss, batch: Any, chunk_size: int
) -> Iterator[tuple[Tensor, ...]]:
    """Give each example's gradients of the named parameters, one after the other.

    ``loss`` sees batches of one example. ``chunk_size`` examples are computed at a time.
    """
    leaves, structure = pytree.tree_flatten(batch)
    places = [place for place, leaf in enumerate(leaves) if _has_examples(leaf)]

    def loss_of_one(values: dict[str, Tensor], example: list[Tensor]) -> Tensor:
        whole = list(leaves)
        for place, tensor in zip(places, example, strict=True):
            whole[place] = tensor.unsqueeze(0)

        def model(*args: Any, **kwargs: Any) -> Any:
            return functional_call(module, values, args, kwargs)

        return loss(model, pytree.tree_unflatten(whole, structure))

    values = {name: parameter.detach() for name, parameter in parameters.items()}
    gradients_of = vmap(grad(loss_of_one), in_dims=(None, 0), randomness="different")
    for chunk in zip(*(leaves[place].split(chunk_size) for place in places), strict=True):
        gradients = gradients_of(values, list(chunk))
        yield from zip(*(gradients[name] for name in parameters), strict=True)


def batch_length(batch: Any) -> int:
    """The number of examples in a collated batch: the leading dimension of its tensors."""
    lengths = {len(leaf) for leaf in pytree.tree_leaves(batch) if _has_examples(leaf)}
    if len(lengths) != 1:
        raise SettingError(
            f"the tensors of a batch have leading dimensions {sorted(lengths)}, so its examples cannot be told "
            "apart; collate them along dimension 0, or measure micro-batches: Probe(unit=MicroBatch())"
        )
    return lengths.pop()


def _has_examples(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


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
        self._parameters: dict[str, Tensor] = {names[each]: each for each in layout.parameters}
        device = layout.parameters[0].device if layout.parameters else torch.device("cpu")
        self._accelerators = [] if device.type == "cpu" else [device]
        self._offsets = list(layout.offsets.values())
        self._mapping = mapping
        self._unit = unit
        self._length = 0
        self._norms = self._adds_up = True

    def begin(self, micro_batches: int, squares: bool = False, keep: bool = False, norms: bool = True) -> None:
        """Forget the last step; of this one ``squares`` of coordinates, images to ``keep``, or ``norms`` are wanted."""
        self._norms = norms
        self.tally.clear()
        self.tally.keep = keep
        self.whole = (0.0, 1.0)
        self._squaring = self.squares if squares else None
        if self._squaring is not None:
            self._squaring.begin({})

    def before(self, batch: Any) -> None:
        """Measure the gradient of each example of the micro-batch that comes next."""
        check_layers(self._module)  # train() or eval() may have been called since attach
        self._length = batch_length(batch)
        # Dropout must draw the same numbers in the user's forward pass as if nothing were measured.
        kind = self._accelerators[0].type if self._accelerators else "cuda"
        with torch.random.fork_rng(self._accelerators, device_type=kind):
            try:
                self._measure(batch)
            except RuntimeError as error:
                error.add_note("(in per-example gradients; a model that cannot have them needs unit=MicroBatch())")
                raise

    def _measure(self, batch: Any) -> None:
        unit = self._unit
        every = per_example_gradients(self._module, self._parameters, unit.loss, batch, unit.chunk_size)
        for gradients in every:
            image = self._mapping.of(gradients, self._offsets) if self.tally.keep else None
            self.tally.add(1.0, norm(gradients) if self._norms else 0.0, image=image)
            if self._squaring is not None:
                self._squaring.add_unit(gradients)

    def before_backward(self) -> None:
        """See whether ``.grad`` will be of this step's examples alone."""
        if not self.whole[0]:
            self._adds_up = sqnorm(self._gradients()) == 0

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
        return sqnorm(self._gradients()) / self.whole[1] ** 2 if self._adds_up else math.nan

    def _gradients(self) -> list[Tensor]:
        return [each.grad for each in self._parameters.values() if each.grad is not None]

    def numbers(self, collected: tuple[Sequence[Tensor], float] | None = None) -> tuple[int, float]:
        """The number of units, and the sum over them of weight times squared gradient norm."""
        return len(self.tally), self.tally.weighted_sqnorm()
