"""The gradients of the loss of single examples, by ``torch.func``, with taps on the layers that allow it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.func import grad, vmap

from paceline.probe.collated import Batch
from paceline.probe.parts import Part, formed, total
from paceline.probe.taps import Layer, Taps, plain_layers
from paceline.probe.units import Loss

__all__ = ["OneByOne"]


class OneByOne:
    """Differentiates the loss of each example alone, by some parameters of a model.

    Gradients that are formed take the memory of ``chunk_size`` times all parameters. Weights of tapped layers are no
    part of that, so that more than ``chunk_size`` examples may be done at a time: as many as there are, mostly. Not
    where such a weight is used in other ways, too, which two examples show (:meth:`learn`).
    """

    def __init__(self, module: nn.Module, parameters: dict[str, nn.Parameter], loss: Loss, chunk_size: int) -> None:
        self._module = module
        self._parameters = parameters
        self._loss = loss
        self._chunk_size = chunk_size
        self._listens = True
        self._many: bool | None = None

    @property
    def untried(self) -> bool:
        """Whether :meth:`learn` has something to find out."""
        return self._many is None

    def learn(self, batch: Batch) -> None:
        """See with two examples whether weights of tapped layers have other uses."""
        self._parts(batch.part(slice(2)), plain_layers(self._module) if self._listens else [])

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
        tapped = self._tapped(layers) if self._many else set()
        others = sum(each.numel() for name, each in self._parameters.items() if name not in tapped)
        return self._chunk_size * sum(each.numel() for each in self._parameters.values()) // max(1, others)

    def _tapped(self, layers: list[Layer]) -> set[str]:
        """The names of their weights."""
        weights = {layer.weight for layer in layers}
        return {name for name, parameter in self._parameters.items() if parameter in weights}

    def _parts(self, chunk: Batch, layers: list[Layer]) -> dict[str, Part] | None:
        """The gradients of all examples of a chunk. None if they have to be found in another way from now on."""
        values = {name: parameter.detach() for name, parameter in self._parameters.items()}
        taps = Taps(layers, values)

        def loss_of_one(values: dict[str, Tensor], example: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            def model(*args: Any, **kwargs: Any) -> Any:
                with replaced(self._module, {id(self._parameters[name]): each for name, each in values.items()}):
                    return self._module(*args, **kwargs)

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
        elsewhere = any(_is_formed(gradients[name]) for name in self._tapped(layers))
        if elsewhere and chunk.length > self._chunk_size and self._many:
            self._many = False
            return None
        if chunk.length > 1:
            self._many = self._many is not False and not elsewhere
        heard = taps.parts(inputs, deltas)
        return {name: _together(gradient, heard.get(name, [])) for name, gradient in gradients.items()}


@contextmanager
def replaced(module: nn.Module, values: dict[int, Tensor]) -> Iterator[None]:
    """Let a model use these instead of its parameters, by their ids.

    As ``torch.func.functional_call``, which leaves a model without its parameters where one module has two names.
    """
    taken: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for each in module.modules():
            table: dict[str, Any] = each._parameters
            found = [(name, parameter) for name, parameter in table.items() if id(parameter) in values]
            taken += [(table, name, parameter) for name, parameter in found]
            table.update((name, values[id(parameter)]) for name, parameter in found)
        yield
    finally:
        for table, name, parameter in taken:
            table[name] = parameter


def _together(gradients: Tensor, heard: list[Part]) -> Part:
    """Add what torch has differentiated, (B, ...), to what the taps have heard of the same parameter."""
    if heard and not _is_formed(gradients) and not gradients[0].any():
        return total(heard)
    return total([*heard, formed(gradients)])


def _is_formed(gradients: Tensor) -> bool:
    """Whether there is one for each example, not the same for all."""
    return len(gradients) > 1 and gradients.stride(0) != 0
