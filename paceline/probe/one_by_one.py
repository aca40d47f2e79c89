"""The gradients of the loss of single examples, by ``torch.func``, with taps on the layers that allow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from paceline.probe.collated import Batch
from paceline.probe.parts import Part, formed, total
from paceline.probe.taps import Layer, Taps, plain_layers
from paceline.probe.units import Loss

__all__ = ["OneByOne"]


class OneByOne:
    """Differentiates the loss of each example alone, by some parameters of a model.

    Gradients that are formed take the memory of ``chunk_size`` times all parameters. Weights of tapped layers are no
    part of that, so that more than ``chunk_size`` examples may be done at a time: as many as there are, mostly.
    """

    def __init__(self, module: nn.Module, parameters: dict[str, nn.Parameter], loss: Loss, chunk_size: int) -> None:
        self._module = module
        self._parameters = parameters
        self._loss = loss
        self._chunk_size = chunk_size
        self._listens = self._many = True

    def of(self, batch: Batch) -> Iterator[tuple[int, dict[str, Part]]]:
        """Some examples of a batch after the other: how many, and their gradients by the names of parameters."""
        done = 0
        while done < batch.length:
            layers = plain_layers(self._module) if self._listens else []
            chunk = batch.part(slice(done, done + self._count(layers)))
            parts = self._parts(chunk, layers)
            if parts is not None:
                yield chunk.length, parts
                done += chunk.length

    def _count(self, layers: list[Layer]) -> int:
        """How many examples may be done at a time."""
        tapped = {layer.weight for layer in layers} if self._many else set()
        every = self._parameters.values()
        others = sum(each.numel() for each in every if each not in tapped)
        return self._chunk_size * sum(each.numel() for each in every) // max(1, others)

    def _parts(self, chunk: Batch, layers: list[Layer]) -> dict[str, Part] | None:
        """The gradients of all examples of a chunk. None if they have to be found in another way from now on."""
        values = {name: parameter.detach() for name, parameter in self._parameters.items()}
        taps = Taps(layers, values)

        def loss_of_one(values: dict[str, Tensor], example: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            def model(*args: Any, **kwargs: Any) -> Any:
                return functional_call(self._module, values, args, kwargs)

            with taps.listening(values):
                loss = self._loss(model, chunk.of_one(example))
            return loss, taps.inputs()

        def of_one(example: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
            gradients, inputs = grad(loss_of_one, has_aux=True)(values, example)
            return gradients, *taps.heard(inputs)

        try:
            with taps.installed():
                gradients, inputs, deltas = vmap(of_one, randomness="different")(chunk.tensors)
        except Exception:
            if not taps.refused:
                raise
        if taps.refused:
            self._listens = False
            return None
        heard = taps.parts(inputs, deltas)
        if chunk.length > self._chunk_size and any(_is_formed(gradients[name]) for name in heard):
            self._many = False
            return None
        return {name: _together(gradient, heard.get(name, [])) for name, gradient in gradients.items()}


def _together(gradients: Tensor, heard: list[Part]) -> Part:
    """Add what torch has differentiated, (B, ...), to what the taps have heard of the same parameter."""
    if heard and not _is_formed(gradients) and not gradients[0].any():
        return total(heard)
    return total([*heard, formed(gradients)])


def _is_formed(gradients: Tensor) -> bool:
    """Whether there is one for each example, not the same for all."""
    return len(gradients) > 1 and gradients.stride(0) != 0
