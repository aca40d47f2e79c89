"""What models and losses do beside calling layers: other derivatives, hooks, changes in place, buffers, precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from paceline.tasks.models import MLP

from .models import loss_of
from .taps import Ear, Ways, batch_of, by_torch_func, expect_equal, measure

BOTH = {"first.weight", "second.weight"}


def straight(model: Any, x: Tensor) -> Any:
    out: Tensor = model.second(model.first(x).tanh())
    return out


def by_hidden(model: Any, x: Tensor) -> Any:
    """Has what a gradient by a hidden layer needs."""
    hidden = model.first(x)
    out: Tensor = model.second(hidden.tanh())
    slope = torch.autograd.grad(out.square().sum(), hidden, create_graph=True)[0]
    return out + slope.sum()


def by_weight(model: Any, x: Tensor) -> Any:
    out: Tensor = model.second(model.first(x).tanh())
    slope = torch.autograd.grad(out.square().sum(), model.first.weight, create_graph=True)[0]
    return out + slope.square().sum()


def by_weight_if_used(model: Any, x: Tensor) -> Any:
    """A weight without a gradient would pass here for zero."""
    out: Tensor = model.second(model.first(x).tanh())
    weight = model.second.weight
    slope = torch.autograd.grad(out.square().sum(), weight, create_graph=True, materialize_grads=True)[0]
    return out + slope.square().sum()


def twice_by_weight(model: Any, x: Tensor) -> Any:
    """The second derivative fails where the first one is of a constant."""
    out: Tensor = model.second(model.first(x).tanh())
    first = torch.autograd.grad(out.square().sum(), model.first.weight, create_graph=True)[0]
    return out + torch.autograd.grad(first.square().sum(), model.second.weight, create_graph=True)[0].sum()


def weight_with_hook(model: Any, x: Tensor) -> Any:
    model.first.weight.register_hook(lambda gradient: 3 * gradient)
    return straight(model, x)


REFUSED = {
    "by hidden": by_hidden,
    "by weight": by_weight,
    "by weight if used": by_weight_if_used,
    "twice by weight": twice_by_weight,
    "hook of a weight": weight_with_hook,
}


@pytest.mark.parametrize("chunk_size", [2, 16])
@pytest.mark.parametrize("name", list(REFUSED))
def test_what_needs_the_derivative_by_a_weight_itself_is_done_without_taps(
    name: str, chunk_size: int, ear: Ear
) -> None:
    expect_equal(Ways(REFUSED[name]).double(), batch_of(5), chunk_size=chunk_size)
    assert ear.refused
    assert not ear.heard


def inner_gradient(model: Any, x: Tensor) -> Any:
    return straight(model, x) + grad(lambda x: straight(model, x).square().sum())(x).sum()


def inner_gradient_by_weight(model: Any, x: Tensor) -> Any:
    def value(weight: Tensor) -> Tensor:
        values = {"weight": weight, "bias": model.first.bias}
        hidden = torch.func.functional_call(model.first, values, (x,))
        out: Tensor = model.second(hidden.tanh()).square().sum()
        return out

    return straight(model, x) + grad(value)(model.first.weight).square().sum()


def inner_tangent(model: Any, x: Tensor) -> Any:
    out, along = jvp(lambda x: straight(model, x), (x,), (torch.ones_like(x),))[:2]
    return out + along.square() + straight(model, x)


def dual_numbers(model: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))  # type: ignore[no-untyped-call]
        out, along = forward_ad.unpack_dual(straight(model, dual))  # type: ignore[no-untyped-call]
    assert along is not None
    return out + along.square() + straight(model, x)


def inner_map(model: Any, x: Tensor) -> Any:
    return vmap(lambda shift: straight(model, x + shift))(torch.arange(3.0, dtype=x.dtype)).mean(0) + straight(model, x)


class Twofold(torch.autograd.Function):
    """Calls a layer in the backward pass."""

    layer: nn.Module

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * Twofold.layer(x).detach()

    generate_vmap_rule = True


def own_function(model: Any, x: Tensor) -> Any:
    Twofold.layer = model.first
    return straight(model, x) + model.second(Twofold.apply(model.first(x)))  # type: ignore[no-untyped-call]


def layer_in_hook(model: Any, x: Tensor) -> Any:
    hidden, values = model.first(x), {"weight": model.first.weight, "bias": model.first.bias}
    hidden.register_hook(lambda gradient: gradient * torch.func.functional_call(model.first, values, (x,)).detach())
    return model.second(hidden.tanh())


ELSEWHERE = {
    "gradient": inner_gradient,
    "gradient by a weight": inner_gradient_by_weight,
    "tangent": inner_tangent,
    "dual numbers": dual_numbers,
    "map": inner_map,
    "backward pass": own_function,
    "hook": layer_in_hook,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("chunk_size", [2, 16])
@pytest.mark.parametrize("name", list(ELSEWHERE))
def test_layers_inside_of_other_transforms_are_differentiated_as_ever(name: str, chunk_size: int, ear: Ear) -> None:
    expect_equal(Ways(ELSEWHERE[name]).double(), batch_of(5), chunk_size=chunk_size)
    assert ear.heard == BOTH
    assert not ear.refused


def test_taps_are_tried_no_more_once_refused(ear: Ear) -> None:
    probe = measure(Ways(by_hidden).double(), batch_of(5))
    assert len(ear.passes) == 2
    probe.before(batch_of(5))
    assert len(ear.passes) == 3


def hooked(model: Any, x: Tensor) -> Any:
    hidden = model.first(x)
    hidden.register_hook(lambda gradient: 2 * gradient)
    out: Tensor = model.second(hidden.tanh())
    return out


def with_forward_hooks(model: Ways) -> nn.Module:
    model.first.register_forward_pre_hook(lambda layer, args: (args[0].sin(),))
    model.first.register_forward_hook(lambda layer, args, out: out.mul_(2).cos())
    return model


@pytest.mark.parametrize("shape", [(5,), (4, 5)])
def test_hooks_of_outputs_and_layers(shape: tuple[int, ...], ear: Ear) -> None:
    def loss(model: Callable[..., Any], batch: Any) -> Tensor:
        out = model(batch[0])
        return F.cross_entropy(out.mean(1) if out.dim() == 3 else out, batch[1])

    expect_equal(Ways(hooked).double(), batch_of(*shape), loss)
    expect_equal(with_forward_hooks(Ways(straight)).double(), batch_of(*shape), loss)
    assert ear.heard == BOTH
    assert not ear.refused


def changed_input(model: Any, x: Tensor) -> Any:
    inputs = x * 1
    hidden = model.first(inputs)
    inputs.mul_(2)
    out: Tensor = model.second(hidden.tanh() + inputs)
    return out


def changed_image(model: Any, x: Tensor) -> Any:
    image = x.view(1, 5) * 1
    hidden = model.image(image)
    image.mul_(2)
    return model.second(hidden.tanh() + image)


def changed_weight(model: Any, x: Tensor) -> Any:
    hidden = model.first(x)
    with torch.no_grad():
        model.second.weight.mul_(1.0)
    out: Tensor = model.second(hidden.tanh())
    with torch.no_grad():
        model.second.weight.mul_(1.0)
    return out


def with_image(way: Callable[[Any, Tensor], Any]) -> Ways:
    model = Ways(way)
    model.image = nn.Conv1d(1, 1, 3, padding=1)
    return model.double()


@pytest.mark.parametrize("way", [changed_input, changed_image, changed_weight])
def test_what_torch_refuses_is_still_refused(way: Callable[[Any, Tensor], Any], ear: Ear) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        by_torch_func(with_image(way), loss_of, batch_of(5))
    model = with_image(way)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        measure(model, batch_of(5))
    assert ear.refused
    assert "forward" not in vars(model.first)


def in_checkpoint(model: Any, x: Tensor) -> Any:
    out: Tensor = model.second(checkpoint(lambda x: model.first(x).tanh(), x, use_reentrant=False))
    return out


def counting(model: Any, x: Tensor) -> Any:
    model.passes += 1
    return straight(model, x) * model.passes


@pytest.mark.parametrize("way", [in_checkpoint, counting])
def test_what_torch_func_cannot_do_has_the_same_error(way: Callable[[Any, Tensor], Any]) -> None:
    model = Ways(way).double()
    model.register_buffer("passes", torch.zeros(()))
    with pytest.raises(RuntimeError) as plain:
        by_torch_func(model, loss_of, batch_of(5))
    with pytest.raises(RuntimeError) as tapped:
        measure(model, batch_of(5))
    assert str(plain.value) == str(tapped.value)
    assert model.passes == 0


def test_dropout_draws_as_without_taps(ear: Ear) -> None:
    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(5, 50), nn.Dropout(0.5), nn.Linear(50, 3)).double()
    expect_equal(model, batch_of(5))
    assert ear.heard == {"1.weight", "3.weight"}


def test_compiled_models_are_left_alone(ear: Ear) -> None:
    compilations = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    compiled: Any = torch.compile(MLP([5, 4, 3]).double(), backend=backend)
    expect_equal(compiled, batch_of(5))
    count = len(compilations)
    measure(compiled, batch_of(5))
    assert len(compilations) == count
    assert not ear.heard


def test_layers_are_as_before_after_an_error(ear: Ear) -> None:
    def broken(model: Callable[..., Any], batch: Any) -> Tensor:
        model(batch[0])
        raise KeyError("mine")

    model = MLP([5, 4, 3]).double()
    with pytest.raises(KeyError, match="mine"):
        measure(model, batch_of(5), broken)
    assert not any("forward" in vars(layer) for layer in model.layers)
    assert not ear.refused
