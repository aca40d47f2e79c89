"""Gradients of single examples with taps on layers, against plain ``torch.func``: what is heard, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as older_weight_norm

from paceline.probe import Example, Probe, sketch
from paceline.roles import Need
from paceline.tasks.models import MLP, CharTransformer, LeNet, ResNet

from .models import loss_of, trainable
from .taps import Ear, Ways, batch_of, by_torch_func, expect_equal


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def weights_of(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.endswith("weight")}


@pytest.mark.parametrize("computed", ["numba", "torch"])
@pytest.mark.parametrize("chunk_size", [1, 4, 16])
def test_weights_of_linear_and_convolution_layers_are_heard_of(
    chunk_size: int, computed: str, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sketch, "has_numba", lambda: computed == "numba")
    models = {MLP([20, 16, 3]).double(): (4, 5), LeNet(2, 8, 3).double(): (2, 8, 8)}
    for model, shape in models.items():
        ear.heard.clear()
        expect_equal(model, batch_of(*shape), chunk_size=chunk_size)
        assert ear.heard == weights_of(model)
    assert not ear.refused


def rows_laid_together(model: Any, x: Tensor) -> Any:
    out: Tensor = model.second(model.first(x.flatten(0, 1)).tanh()).unflatten(0, x.shape[:2]).sum(1)
    return out


def silent(model: Any, x: Tensor) -> Any:
    with torch.no_grad():
        out: Tensor = model.first(x)
    return out


def doubled(x: Tensor) -> Tensor:
    x[..., :2].mul_(2)
    return x.tanh_()


def replaced(model: Any, x: Tensor) -> Any:
    """The layer has another weight, as in networks that compute weights."""
    other = {"weight": 2 * model.first.weight.tanh()}
    out: Tensor = model.second(torch.func.functional_call(model.first, other, (x,)))
    return out


def routed(model: Any, x: Tensor) -> Any:
    """One of two layers for each row, by what the row says."""
    chosen = x.sum(-1, keepdim=True) > 0
    return model.second(torch.where(chosen, model.first(x), x)) * chosen.double().exp()


def spread(model: Any, x: Tensor) -> Any:
    """The output depends on the whole batch that the model sees, without a gradient."""
    hidden = model.first(x).tanh()
    return model.second(hidden / hidden.detach().norm(dim=0).add(1)) * x.detach().std(0, correction=0).add(1).mean()


BOTH = {"first.weight", "second.weight"}
SECOND = {"second.weight"}

WAYS: dict[str, tuple[Callable[[Any, Tensor], Any], tuple[int, ...], set[str]]] = {
    "keywords": (lambda model, x: model.second(model.first(input=x).tanh()), (5,), BOTH),
    "rows without a batch": (lambda model, x: model.second(model.first(x[0]).tanh()).unsqueeze(0), (5,), BOTH),
    "sequences": (lambda model, x: model.second(model.first(x).tanh()).mean(1), (4, 5), BOTH),
    "grids": (lambda model, x: model.second(model.first(x).tanh()).mean((1, 2)), (2, 3, 5), BOTH),
    "no rows": (lambda model, x: model.second(x) + model.first(x.unsqueeze(1)[:, :0]).sum(1).sum(1), (5,), BOTH),
    "rows laid together": (rows_laid_together, (4, 5), BOTH),
    "sequence first": (lambda model, x: model.second(model.first(x.transpose(0, 1)).tanh())[-1], (4, 5), BOTH),
    "one is not used": (lambda model, x: model.second(x), (5,), SECOND),
    "one has no gradient": (lambda model, x: model.second(x + model.first(x).detach()), (5,), SECOND),
    "once without gradient": (lambda model, x: model.second(model.first(x).tanh() + silent(model, x)), (5,), BOTH),
    "in place": (lambda model, x: model.second(doubled(model.first(x))), (5,), BOTH),
    "in place, sequences": (lambda model, x: model.second(doubled(model.first(x))).mean(1), (4, 5), BOTH),
    "twice": (lambda model, x: model.second(model.first(model.first(x).tanh())), (5,), BOTH),
    "also as a weight": (lambda model, x: model.second(F.linear(model.first(x), model.first.weight)), (5,), BOTH),
    "only as a weight": (lambda model, x: model.second(F.linear(x, model.first.weight)), (5,), SECOND),
    "penalty": (lambda model, x: model.second(x) * model.second.bias.exp(), (5,), SECOND),
    "replaced": (replaced, (5,), SECOND),
    "routed": (routed, (4, 5), BOTH),
    "by the batch, no gradient": (spread, (5,), BOTH),
    "centred by the batch": (lambda model, x: model.second(model.first(x - x.mean(0)).tanh() + x), (5,), BOTH),
    "the same for all": (lambda model, x: model.second(x + model.first(x.new_ones(2, 5)).sum(0)), (5,), BOTH),
}


@pytest.mark.parametrize("chunk_size", [1, 4, 16])
@pytest.mark.parametrize("name", list(WAYS))
def test_ways_to_use_layers(name: str, chunk_size: int, ear: Ear) -> None:
    way, shape, heard = WAYS[name]

    def loss(model: Callable[..., Any], batch: Any) -> Tensor:
        out = model(batch[0])
        return F.cross_entropy(out.mean(1) if out.dim() == 3 else out, batch[1])

    expect_equal(Ways(way).double(), batch_of(*shape), loss, chunk_size)
    assert ear.heard == heard
    assert not ear.refused


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    model[2].weight = model[0].weight
    return model


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def own_forward() -> nn.Module:
    layer = nn.Linear(5, 3)
    layer.forward = lambda input: 2 * F.linear(input, layer.weight)  # type: ignore[method-assign]
    return nn.Sequential(layer)


class Temperature(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 3), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.scale
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "tied": (tied, {"0.weight", "4.weight"}),
    "computed": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 7)), nn.Linear(7, 3)), {"1.weight"}),
    "computed by hooks": (lambda: nn.Sequential(older_weight_norm(nn.Linear(5, 7)), nn.Linear(7, 3)), {"1.weight"}),
    "subclass": (lambda: nn.Sequential(Scaled(5, 4), nn.Linear(4, 3)), {"1.weight"}),
    "a forward of its own": (own_forward, set()),
    "norm": (lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)), {"0.weight", "2.weight"}),
    "no bias": (lambda: nn.Sequential(nn.Linear(5, 4, False), nn.Linear(4, 3, False)), {"0.weight", "1.weight"}),
    "no dimensions": (Temperature, {"layer.weight"}),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("chunk_size", [2, 16])
@pytest.mark.parametrize("name", list(MODELS))
def test_models_with_other_layers(name: str, chunk_size: int, ear: Ear) -> None:
    build, heard = MODELS[name]
    model = build().double()
    forward = vars(model[0])["forward"] if name == "a forward of its own" else None  # type: ignore[index]
    if forward is None:
        expect_equal(model, batch_of(5), chunk_size=chunk_size)
    else:
        torch.testing.assert_close(
            measure_own(model), by_torch_func(model, loss_of, batch_of(5)).square().sum(1), rtol=1e-9, atol=0
        )
        assert vars(model[0])["forward"] is forward  # type: ignore[index]
    assert ear.heard == heard


def measure_own(model: nn.Module) -> Tensor:
    probe = Probe(unit=Example(loss_of))
    probe.attach(model, trainable(model), frozenset({Need.VARIANCE}))
    probe.begin(1)
    probe.before(batch_of(5))
    return probe.sqnorms()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_residual_networks_and_transformers(ear: Ear) -> None:
    expect_equal(ResNet(3, 3, width=8).double(), batch_of(3, 8, 8, examples=3))
    assert {name.split(".")[-1] for name in ear.heard} == {"weight"}
    ids = torch.randint(0, 7, (3, 4))

    def loss(model: Callable[..., Any], batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    expect_equal(CharTransformer(7, 4, width=8, heads=2, layers=1).double(), (ids, ids.roll(1, 1)), loss)
    assert {"blocks.0.qkv.weight", "head.weight"} <= ear.heard
    assert not ear.refused


def test_an_embedding_that_is_also_the_head_is_formed_for_few_examples_at_a_time(ear: Ear) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.head = nn.Embedding(3, 6), nn.Linear(6, 3)
            self.head.weight = self.token.weight

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.token(ids).tanh().mean(1))
            return out

    ids = torch.randint(0, 3, (6, 4))
    expect_equal(Tokens().double(), (ids, ids[:, 0]), chunk_size=2)
    assert ear.heard == {"token.weight"}
    assert len(ear.passes) == 2 * (1 + 3)  # one to learn from


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_frozen_parameters(frozen: str, ear: Ear) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model.get_parameter(frozen).requires_grad_(False)
    expect_equal(model, batch_of(5))
    assert ear.heard == {"0.weight", "2.weight"} - {frozen}


def test_losses_of_every_kind() -> None:
    def summed(model: Callable[..., Any], batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum").square()

    def twice(model: Callable[..., Any], batch: Any) -> Tensor:
        other: Tensor = model(-batch[0]).square().mean()
        return loss_of(model, batch) + other

    def both(model: Callable[..., Any], batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(torch.cat([inputs, -inputs]))[:1], labels)

    def of_nothing(model: Callable[..., Any], batch: Any) -> Tensor:
        out: Tensor = batch[0].sum() + 0 * model(batch[0]).detach().sum()
        return out

    for loss in (summed, twice, both, of_nothing):
        for chunk_size in (1, 4, 16):
            expect_equal(MLP([5, 4, 3]).double(), batch_of(5), loss, chunk_size)


def test_penalties_on_weights_are_the_same_for_all_examples(ear: Ear) -> None:
    model = MLP([5, 4, 3]).double()

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.inner(x), sum((each.square().sum() for each in self.parameters()), torch.zeros(()))

    def loss(model: Callable[..., Any], batch: Any) -> Tensor:
        out, penalty = model(batch[0])
        total: Tensor = F.cross_entropy(out, batch[1]) + penalty
        return total

    for chunk_size in (1, 2, 16):
        expect_equal(Penalised().double(), batch_of(5), loss, chunk_size)
    assert ear.heard == {"inner.layers.0.weight", "inner.layers.1.weight"}


@dataclass
class Found:
    logits: Tensor
    name: str = "some"


def test_models_may_give_and_take_anything(ear: Ear) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: dict[str, Tensor], *, scale: float) -> Found:
            x["x"].mul_(1.0)
            return Found(scale * self.layer(x["x"]))

    def loss(model: Callable[..., Any], batch: Any) -> Tensor:
        return F.cross_entropy(model({"x": batch[0].clone()}, scale=2.0).logits, batch[1])

    expect_equal(Several().double(), batch_of(5), loss)
    assert ear.heard == {"layer.weight"}
