"""Calls of layers in one forward pass, seen for all examples at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils import _pytree as pytree

__all__ = ["Apart", "Call", "Log", "Tap", "Together", "leaves_of"]


@dataclass(frozen=True)
class Call:
    """One call of a layer, for all examples."""

    layer: nn.Module
    inputs: Tensor  # (B, ...)
    before: Node | None
    """What the inputs come from."""
    outputs: GradientEdge


@dataclass
class Log:
    """What was called in one pass."""

    examples: int
    calls: list[Call] = field(default_factory=list)
    alike: list[nn.Module] = field(default_factory=list)
    """Layers that were called with the same for all examples."""
    leaves: list[Tensor] = field(default_factory=list)
    """What the model was called with, where it can be differentiated by."""

    def note(self, layer: nn.Module, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Write a call down; gives what takes the place of its outputs."""
        if not outputs.requires_grad:
            return outputs
        if outputs._is_view():
            outputs = outputs.clone()  # an operation in place on a view goes round it in the graph
        self.calls.append(Call(layer, inputs.detach(), inputs.grad_fn, get_gradient_edge(outputs)))
        return outputs


class Tap(torch.autograd.Function):
    """Notes a call that is made for each example, under ``vmap``."""

    @staticmethod
    def forward(log: Log, layer: nn.Module, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Nothing here depends on the example."""
        log.alike.append(layer)
        return outputs.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Of the outputs alone."""
        return None, None, None, *gradients

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], log: Log, layer: nn.Module, inputs: Tensor, outputs: Tensor
    ) -> tuple[Tensor, int]:
        """All examples, along the first dimension."""
        sides = zip((inputs, outputs), in_dims[2:], strict=True)
        return log.note(layer, *(_leading(each, at, info.batch_size) for each, at in sides)), 0


def _leading(tensor: Tensor, at: int | None, examples: int) -> Tensor:
    return tensor.expand(examples, *tensor.shape) if at is None else tensor.movedim(at, 0)


class Apart(Exception):
    """A model cannot be called for all examples together; the argument says why."""


class Together:
    """A stand-in for a model under ``vmap`` that calls it once, with all examples in one batch.

    A loss of single examples then costs no more than that of a batch: ``vmap`` does not reach into the model.
    """

    def __init__(self, module: nn.Module, log: Log, differentiate: bool) -> None:
        self._module, self._log, self._differentiate = module, log, differentiate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Called with batches of one, gives one: all of them are seen by :meth:`whole`."""
        leaves, self._given = pytree.tree_flatten((args, kwargs))
        found = iter(_Whole.apply(self, *leaves))  # type: ignore[no-untyped-call]
        results = [next(found) if isinstance(each, Tensor) else each for each in self._results]
        return pytree.tree_unflatten(results, self._returned)

    def whole(self, in_dims: tuple[int | None, ...], leaves: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Call the model with all examples: tensors (B, 1, ...) are batches of B."""
        together = [
            each if at is None else self._joined(each.movedim(at, 0)) for each, at in zip(leaves, in_dims, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(together, self._given)
        try:
            outputs = self._module(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise Apart(f"called with all examples it fails: {error}") from error
        self._results, self._returned = pytree.tree_flatten(outputs)
        tensors = [each for each in self._results if isinstance(each, Tensor)]
        if any(each.dim() == 0 or len(each) != self._log.examples for each in tensors):
            raise Apart("it gives something that is not one for each example")
        return tuple(each.unsqueeze(1) for each in tensors)

    def _joined(self, tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != 1:
            raise Apart("its loss calls it with something else than a batch of one")
        batch = tensor.squeeze(1)
        if self._differentiate and batch.is_floating_point() and not batch.requires_grad:
            self._log.leaves.append(batch.detach().requires_grad_())
            batch = self._log.leaves[-1].clone()  # a leaf cannot be changed in place
        return batch


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(model: Together, *leaves: Any) -> tuple[Tensor, ...]:
        raise Apart("its loss calls it with the same for all examples")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], model: Together, *leaves: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        outputs = model.whole(in_dims[1:], leaves)
        return outputs, (0,) * len(outputs)


def leaves_of(starts: Iterable[Node | None], stops: set[Node]) -> set[Tensor]:
    """The leaves of the graph that are reached from ``starts`` without going through ``stops``."""
    found, seen = set[Tensor](), set(stops)
    waiting = [node for node in starts if node is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(leaf)
        waiting += [after for after, _ in node.next_functions if after is not None]
    return found
