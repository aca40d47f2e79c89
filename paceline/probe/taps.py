"""Weights of linear and convolution layers that are not differentiated by: what goes in and what comes back is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import maybe_current_level
from torch.autograd.forward_ad import unpack_dual

from paceline.probe.parts import Conv, Geometry, Part, of_convolution, of_linear

__all__ = ["Layer", "Taps", "plain_layers"]

Layer = nn.Linear | Conv
KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(eq=False)
class Call:
    """One use of a weight by its layer, in the pass of all examples of a chunk."""

    name: str
    """Of the weight."""
    how: Geometry | None
    """None for a linear layer."""
    inputs: Tensor
    version: int
    delta: Tensor | None = None
    """The gradient of what came out; None if the loss does not depend on it."""


class Taps:
    """Listens to the layers of a model inside of ``vmap(grad(loss_of_one))``.

    A plain linear or convolution layer that is called with its weight, as ``grad`` gave it to the model, uses a
    constant of the same numbers instead, and the call is noted. So the derivative by the weight lacks what comes from
    this call alone: the product of what went in and of the gradient of what came out. Every other use of the weight
    is differentiated as ever.

    A loss that differentiates by itself (a penalty on gradients) would not see the constant. To notice, a
    weight stays in the graph of each call, through a sum of none of its numbers: a backward pass before the loss is
    there then comes by, and ``refused`` says that nothing that was found may be used.
    """

    def __init__(self, layers: list[Layer], constants: dict[str, Tensor]) -> None:
        self._layers = layers
        self._constants = constants
        self._given: dict[int, str] = {}
        self._level: int | None = None
        self._open = False
        self._calls: list[Call] = []
        self.refused = False
        """Whether something was done that needs the derivative by the weights themselves."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Stand in for the forward functions of the layers."""
        try:
            for layer in self._layers:
                # As a method, so that a copy of the model that is made meanwhile has one of its own.
                layer.forward = MethodType(self._stand_in(layer.forward), layer)  # type: ignore[method-assign]
            yield
        finally:
            for layer in self._layers:
                vars(layer).pop("forward", None)

    @contextmanager
    def listening(self, values: dict[str, Tensor]) -> Iterator[None]:
        """The loss is computed now, with these as parameters."""
        self._given = {id(value): name for name, value in values.items()}
        versions = {name: value._version for name, value in values.items()}
        self._level = maybe_current_level()
        self._calls, self._open = [], True
        try:
            yield
        finally:
            self._open = False
            self.refused |= any(self._spoiled(call, values[call.name], versions[call.name]) for call in self._calls)

    def inputs(self) -> list[Tensor]:
        """What went into the layers, call by call."""
        return [call.inputs for call in self._calls]

    def heard(self, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """After the backward pass: what went in and what came back, of the calls that the loss depends on."""
        pairs = [(call, each) for call, each in zip(self._calls, inputs, strict=True) if call.delta is not None]
        self._calls = [call for call, _ in pairs]
        # Detached, since they come from within the derivative, which is over.
        return [each for _, each in pairs], [call.delta.detach() for call in self._calls if call.delta is not None]

    def parts(self, inputs: list[Tensor], deltas: list[Tensor]) -> dict[str, list[Part]]:
        """The gradients of weights that were heard of, for all examples, (B, ...) each, call by call."""
        parts: dict[str, list[Part]] = {}
        for call, *both in zip(self._calls, inputs, deltas, strict=True):
            part = of_linear(*both) if call.how is None else of_convolution(call.how, *both)
            parts.setdefault(call.name, []).append(part)
        return parts

    def _stand_in(self, plain: Any) -> Any:
        usual = plain.__func__

        def forward(layer: Layer, input: Tensor) -> Any:
            name = self._given.get(id(layer.weight))
            return usual(layer, input) if name is None or not self._may_tap(input) else self._tap(layer, name, input)

        return forward

    def _may_tap(self, inputs: Tensor) -> bool:
        """Not inside of another derivative, nor in a backward pass (that computes something again)."""
        return (
            self._open
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and maybe_current_level() == self._level
            and unpack_dual(inputs).tangent is None  # type: ignore[no-untyped-call]
        )

    def _tap(self, layer: Layer, name: str, inputs: Tensor) -> Tensor:
        weight, constant = layer.weight, self._constants[name]
        link = weight[:0].sum()
        link.register_hook(lambda gradient: constant.new_zeros((), dtype=gradient.dtype))  # type: ignore[no-untyped-call]
        bias = link.expand(len(constant)) if layer.bias is None else layer.bias + link
        # What is given to the model may be a view of what is listened to, not the reverse: operations in place on
        # a view leave its own node out of the graph.
        if isinstance(layer, nn.Linear):
            rows = inputs if inputs.dim() == 2 else inputs.unsqueeze(0).flatten(0, -2)
            whole = F.linear(rows, constant, bias)
            outputs = whole if inputs.dim() == 2 else whole.view(*inputs.shape[:-1], len(constant))
            call = Call(name, None, inputs, inputs._version)
        else:
            single = inputs.dim() < constant.dim()
            images = inputs.unsqueeze(0) if single else inputs
            whole = layer._conv_forward(images, constant, bias)
            outputs = whole.squeeze(0) if single else whole
            call = Call(name, Geometry.of(layer), images, images._version)
        assert whole.grad_fn is not None
        assert not whole._is_view()
        whole.grad_fn.register_prehook(partial(self._hear, call))
        self._calls.append(call)
        return outputs

    @staticmethod
    def _spoiled(call: Call, weight: Tensor, version: int) -> bool:
        """Whether the weight has a hook, or numbers were changed in place, which is for torch to refuse."""
        return bool(weight._backward_hooks) or weight._version != version or call.inputs._version != call.version

    def _hear(self, call: Call, gradients: tuple[Tensor | None, ...]) -> None:
        """The backward pass has come to a call: once, after the loss was there, or the weight itself was needed."""
        self.refused |= self._open or call.delta is not None
        call.delta = gradients[0]


def plain_layers(module: nn.Module) -> list[Layer]:
    """The layers that do what their class does; their weights are looked at when they are called."""
    every = list(module.modules())
    if any(map(_is_compiled, every)):
        return []
    return [each for each in every if isinstance(each, KINDS) and _is_plain(each)]


def _is_plain(layer: Layer) -> bool:
    own = vars(layer)
    changed = "forward" in own or "_conv_forward" in own or "weight" not in layer._parameters
    return type(layer) in KINDS and not changed and layer.weight.is_floating_point() and _is_told_in_full(layer)


def _is_told_in_full(layer: Layer) -> bool:
    """Whether a convolution has a number for each side, as after its construction: torch takes single ones, too."""
    if isinstance(layer, nn.Linear):
        return True
    sides, told = layer.weight.dim() - 2, [layer.stride, layer.dilation]
    told += [] if isinstance(layer.padding, str) else [layer.padding]
    return all(isinstance(each, tuple) and len(each) == sides for each in told)


def _is_compiled(module: nn.Module) -> bool:
    """Whether a compiler has seen it, which would have to see it anew."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
