"""Small models, and a step of a loop as a run would drive the probe through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.probe import Probe
from paceline.roles import Need

VARIANCE = frozenset({Need.VARIANCE})
Batch = tuple[Tensor, Tensor]


def small_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def small_batch(examples: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(examples, 5, generator=generator, dtype=dtype)
    return inputs, torch.randint(0, 3, (examples,), generator=generator)


def loss_of(model: Callable[..., Any], batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def flat_gradient(model: nn.Module, batch: Batch) -> Tensor:
    """The gradient of the mean loss, by plain autograd."""
    parameters = trainable(model)
    gradients = torch.autograd.grad(loss_of(model, batch), parameters, allow_unused=True)
    pairs = zip(parameters, gradients, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in pairs])


def flat_gradients(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    return torch.stack([flat_gradient(model, batch) for batch in batches])


def cut(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Micro-batches of these sizes, one after the other."""
    return list(zip(*(torch.split(part, list(sizes)) for part in batch), strict=True))


def drive(
    probe: Probe,
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    amp_scale: float = 1.0,
    during_backward: Callable[[bool], None] = lambda last: None,
    needs: frozenset[Need] = frozenset(Need),
) -> None:
    """One step on one worker, with losses scaled by their shares and by the AMP scale."""
    total = sum(len(batch[0]) for batch in batches)
    probe.begin(len(batches), needs)
    for number, batch in enumerate(batches):
        probe.before(batch)
        weight = float(len(batch[0]))
        factor = amp_scale * weight / total
        loss = loss_of(model, batch) * factor
        probe.before_backward()
        torch.autograd.backward(loss)
        during_backward(number == len(batches) - 1)
        probe.after_backward(weight, factor)


def drive_gradients(
    probe: Probe, parameter: nn.Parameter, gradients: Tensor, weights: Sequence[float], factors: Sequence[float]
) -> None:
    """One step whose units have exactly these gradients."""
    probe.begin(len(gradients))
    for gradient, weight, factor in zip(gradients, weights, factors, strict=True):
        loss = (parameter * gradient).sum() * factor
        probe.before_backward()
        torch.autograd.backward(loss)
        probe.after_backward(weight, factor)


def expect(probe: Probe, units: int, weighted_sqnorm: float) -> None:
    found = probe.numbers()
    assert found[0] == units
    assert found[1] == pytest.approx(weighted_sqnorm)


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and notes the largest tensor that any of them returned in memory of its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def tensors_in(value: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """All tensors that can be reached through containers and attributes, parameters of models left out."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Parameter | nn.Module):
        return
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each, seen)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from tensors_in(each, seen)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value), seen)
