"""Gradients of layers for single examples, from what goes into them and from the gradients of what comes out."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call, vmap

from paceline.errors import SettingError
from paceline.probe.calls import Apart, Log, Tap, Together, leaves_of
from paceline.probe.collated import Batch
from paceline.probe.parts import Parts, formed, of_convolution, of_linear
from paceline.probe.units import Loss

__all__ = ["Tapped"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Tapped:
    """A model whose linear and convolution layers are tapped; of its other parameters every example gets a copy.

    The gradient of such a layer for one example is made of its inputs and of the gradients of its outputs. An ordinary
    backward pass over the batch has these for all examples, and gradients of weights need not be computed. That is
    exact if the layer's parameters are used there alone, and once. So every pass is looked at: parameters that are
    used otherwise are copied from then on, for which torch computes one gradient an example.

    The loss is that of single examples, under ``vmap``. A model without copies is called once for all of them; for
    each new shape of a batch it is made sure that the loss of one example has no gradient by what belongs to others.
    """

    def __init__(self, module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        self._module = module
        self._parameters = parameters
        self.copied: dict[str, str] = {}
        """The parameters that every example has a copy of, each with the reason."""
        self.apart = ""
        """Why the model is called for each example, if it is though nothing is copied."""
        self._checked: set[object] = set()
        self._layers: dict[nn.Module, list[str]] = {}
        owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {each: [] for each in parameters.values()}
        for path, layer in module.named_modules():
            for parameter in layer.parameters(recurse=False):
                if parameter in owners:
                    owners[parameter].append((path, layer))
        for name, parameter in parameters.items():
            (path, layer), *others = owners[parameter]
            reason = f"it belongs to {path!r} and {others[0][0]!r}" if others else _unfit(path, layer, parameter)
            if reason:
                self.copied[name] = reason
            else:
                self._layers.setdefault(layer, []).append(name)

    def parts(self, loss: Loss, batch: Batch) -> Parts | None:
        """The gradients of the loss of each example, which ``loss`` sees as a batch of one.

        Parameters without a gradient are left out. None if it turned out that it has to be done in another way.
        """
        log, together = Log(batch.length), not self.copied and not self.apart
        kind = (self._module.training, *(each.shape for each in batch.tensors))
        check = together and batch.length > 1 and kind not in self._checked
        copies = {
            name: self._parameters[name].detach().expand(batch.length, *self._parameters[name].shape).requires_grad_()
            for name in self.copied
        }
        try:
            losses = self._forward(loss, batch, copies, log, Together(self._module, log, check) if together else None)
            if losses.dim() != 1:
                raise SettingError(f"the loss of a batch has shape {tuple(losses.shape[1:])}; Example needs a scalar")
            if check:
                _refuse_mixed(losses, log)
                self._checked.add(kind)
            return None if self._misused(log, losses) else self._backward(log, losses, copies)
        except Apart as reason:
            self.apart = str(reason)
            return None

    def _forward(
        self, loss: Loss, batch: Batch, copies: dict[str, Tensor], log: Log, together: Together | None
    ) -> Tensor:
        def loss_of_one(own: dict[str, Tensor], example: list[Tensor]) -> Tensor:
            def model(*args: Any, **kwargs: Any) -> Any:
                return functional_call(self._module, own, args, kwargs)

            return loss(together or model, batch.of_one(example))

        def tap(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Tensor) -> Any:
            inputs = args[0] if args else kwargs["input"]
            if together is None:
                return Tap.apply(log, layer, inputs, outputs)  # type: ignore[no-untyped-call]
            return log.note(layer, inputs, outputs)

        with ExitStack() as hooks, torch.enable_grad():
            for layer in self._layers:
                hooks.callback(layer.register_forward_hook(tap, prepend=True, with_kwargs=True).remove)
            losses: Tensor = vmap(loss_of_one, randomness="different")(copies, batch.tensors)
        return losses

    def _misused(self, log: Log, losses: Tensor) -> bool:
        """Whether parameters of tapped layers are used otherwise than once, by their layer; these get copies."""
        reasons = dict.fromkeys(log.alike, "its layer sees the same in all examples")
        called = set[nn.Module]()
        for call in log.calls:
            if call.layer in called:
                reasons[call.layer] = "its layer is called more than once"
            called.add(call.layer)
        outside = leaves_of([losses.grad_fn, *(call.before for call in log.calls)], {c.outputs.node for c in log.calls})
        for layer, names in self._layers.items():
            if any(self._parameters[name] in outside for name in names):
                reasons.setdefault(layer, "it is used outside of its layer")
        for layer, reason in reasons.items():
            self.copied |= dict.fromkeys(self._layers.pop(layer), reason)
        return bool(reasons)

    def _backward(self, log: Log, losses: Tensor, copies: dict[str, Tensor]) -> Parts:
        sought: list[Any] = [*(call.outputs for call in log.calls), *copies.values()]
        if not sought or losses.grad_fn is None:
            return {}
        found = [each if each is None else _wide(each) for each in grad(losses.sum(), sought, allow_unused=True)]
        parts: Parts = {}
        for call, deltas in zip(log.calls, found, strict=False):
            if deltas is not None:
                inputs, deltas = (_by_example(_wide(each), log.examples) for each in (call.inputs, deltas))
                parts |= _of_layer(call.layer, inputs, deltas)
        for name, gradients in zip(copies, found[len(log.calls) :], strict=True):
            if gradients is not None:
                parts[self._parameters[name]] = formed(gradients)
        return parts


def _unfit(path: str, layer: nn.Module, parameter: nn.Parameter) -> str:
    """Why the parameter of a layer cannot be tapped; nothing if it can."""
    own = dict(layer.named_parameters(recurse=False))
    if type(layer) not in (nn.Linear, *CONVOLUTIONS) or "forward" in vars(layer):
        return f"{path!r} ({type(layer).__name__}) is no plain Linear or convolution"
    if "weight" not in own or all(parameter is not own.get(name) for name in ("weight", "bias")):
        return f"{path!r} computes its weight from others"
    return ""


def _of_layer(layer: nn.Module, inputs: Tensor, deltas: Tensor) -> Parts:
    if isinstance(layer, nn.Linear):
        return of_linear(layer, inputs, deltas)
    assert isinstance(layer, CONVOLUTIONS)
    return of_convolution(layer, inputs, deltas)


def _refuse_mixed(losses: Tensor, log: Log) -> None:
    """Make sure that the losses of the first and the last example depend on what belongs to these alone."""
    sought: list[Any] = [*(call.outputs for call in log.calls), *log.leaves]
    for example in (0, log.examples - 1) if sought and losses.requires_grad else ():
        every: tuple[Tensor | None, ...] = grad(losses[example], sought, retain_graph=True, allow_unused=True)
        for found in (each for each in every if each is not None):
            if len(found) % log.examples:
                raise Apart("a layer gets something that is not the same number of rows for each example")
            others = found.reshape(log.examples, -1).any(1)
            others[example] = False
            if others.any():
                raise Apart("the loss of one example depends on others")


def _by_example(tensor: Tensor, examples: int) -> Tensor:
    """(B, ...) as it is, or what a model has laid together, (B n, ...), as (B, n, ...)."""
    return tensor if len(tensor) == examples else tensor.view(examples, -1, *tensor.shape[1:])


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
