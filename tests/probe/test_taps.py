"""Gradients of single examples, straight from the layers, against ``torch.func``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.events import Event, Remark
from paceline.probe import Example, Probe, SignSketch, sketch
from paceline.roles import Need
from paceline.tasks.models import MLP, CharTransformer, LeNet, ResNet

from .models import Allocations, loss_of, trainable

EVERYTHING = frozenset({Need.VARIANCE, Need.UNITS, Need.COORDINATES})
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Callable[..., Any], Any], Tensor]


def by_torch_func(model: nn.Module, loss: Loss, batch: Batch) -> Tensor:
    """(B, d): each example's gradient."""
    values = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}

    def loss_of_one(values: dict[str, Tensor], *example: Tensor) -> Tensor:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return functional_call(model, values, args, kwargs)

        return loss(stand_in, tuple(each.unsqueeze(0) for each in example))

    in_dims = (None, *(0 for _ in batch))
    found = vmap(grad(loss_of_one), in_dims, randomness="different")(values, *batch)
    return torch.cat([each.flatten(1) for each in found.values()], 1)


def measure(model: nn.Module, batch: Any, loss: Loss = loss_of, chunk_size: int = 16, **settings: Any) -> Probe:
    probe = Probe(unit=Example(loss, chunk_size), **settings)
    probe.attach(model, trainable(model), EVERYTHING)
    probe.begin(1)
    probe.before(batch)
    return probe


def expect_equal(model: nn.Module, batch: Batch, loss: Loss = loss_of, chunk_size: int = 16) -> list[str]:
    """Images, norms and squares are those of torch.func; gives what was said about the way."""
    expected = by_torch_func(model, loss, batch)
    close: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-13}
    probe = measure(model, batch, loss, chunk_size, exact=True)
    torch.testing.assert_close(torch.stack(probe.images()), expected, **close)
    torch.testing.assert_close(probe.sqnorms(), expected.square().sum(1), **close)
    squares = torch.cat([each.flatten() for each in probe.squares()])
    torch.testing.assert_close(squares, expected.square().sum(0), **close)
    sketched = measure(model, batch, loss, chunk_size, size=97)
    images = torch.stack([SignSketch(len(each), 97, dtype=torch.float64).of([each], [0]) for each in expected])
    torch.testing.assert_close(torch.stack(sketched.images()), images, rtol=1e-10, atol=1e-12)
    said = probe.remarks()
    assert sketched.remarks() == said
    assert sketched.remarks() == []
    return said


def batch_of(*shape: int, classes: int = 3, examples: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(examples, *shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, classes, (examples,), generator=generator)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["numba", "torch"])
def computed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch, "has_numba", lambda: request.param == "numba")


@pytest.mark.usefixtures("computed")
@pytest.mark.parametrize("chunk_size", [1, 4, 16])
def test_models_of_linear_and_convolution_layers_are_taken_straight_from_them(chunk_size: int) -> None:
    assert expect_equal(MLP([20, 16, 3]).double(), batch_of(4, 5), chunk_size=chunk_size) == []
    assert expect_equal(LeNet(2, 8, 3).double(), batch_of(2, 8, 8), chunk_size=chunk_size) == []


CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.Conv1d(4, 6, 3), (4, 9)),
    "1d, all": (nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (4, 9)),
    "2d, stride": (nn.Conv2d(4, 6, (3, 2), stride=(2, 3), bias=False), (4, 9, 8)),
    "2d, dilation": (nn.Conv2d(4, 6, (2, 3), dilation=(3, 2), padding=(1, 2)), (4, 9, 8)),
    "2d, groups": (nn.Conv2d(4, 8, 3, groups=4, padding=1, stride=2), (4, 9, 8)),
    "2d, same": (nn.Conv2d(4, 6, (3, 4), padding="same", dilation=2), (4, 9, 8)),
    "2d, circular": (nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="circular"), (4, 9, 8)),
    "2d, rows left over": (nn.Conv2d(4, 6, 2, stride=3), (4, 9, 9)),
    "3d": (nn.Conv3d(2, 4, (2, 3, 2), stride=(1, 2, 1), padding=(1, 0, 1), dilation=(2, 1, 1), groups=2), (2, 5, 6, 4)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", list(CONVOLUTIONS))
def test_convolutions_of_every_kind(name: str) -> None:
    layer, shape = CONVOLUTIONS[name]
    model = nn.Sequential(layer, nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(3)).double()
    batch = batch_of(*shape)
    model(batch[0])
    assert expect_equal(model, batch) == []


class Ways(nn.Module):
    """A model of two linear layers that are used in some way."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor], width: int = 5) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, width), nn.Linear(width, 3)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def rows_laid_together(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model.second(model.first(x.flatten(0, 1)).tanh()).unflatten(0, x.shape[:2]).sum(1)
    return out


STRAIGHT: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "keywords": (lambda model, x: model.second(model.first(input=x).tanh()), (5,)),
    "sequences": (lambda model, x: model.second(model.first(x).tanh()).mean(1), (4, 5)),
    "grids": (lambda model, x: model.second(model.first(x).tanh()).mean((1, 2)), (2, 3, 5)),
    "rows laid together": (rows_laid_together, (4, 5)),
    "one is not used": (lambda model, x: model.second(x), (5,)),
    "one has no gradient": (lambda model, x: model.second(x + model.first(x).detach()), (5,)),
    "once without gradient": (lambda model, x: model.second(model.first(x).tanh() + silent(model, x)), (5,)),
    "in place, sequences": (lambda model, x: model.second(doubled(model.first(x))).mean(1), (4, 5)),
    "in place on a part": (lambda model, x: model.second(doubled(model.first(x))), (5,)),
}


def silent(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model.first(x)
    return out


def doubled(x: Tensor) -> Tensor:
    x[:, :2].mul_(2)
    return x.tanh_()


@pytest.mark.parametrize("name", list(STRAIGHT))
def test_ways_to_use_layers_that_are_straight(name: str) -> None:
    way, shape = STRAIGHT[name]
    assert expect_equal(Ways(way).double(), batch_of(*shape)) == []


def weight_twice(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model.second(F.linear(model.first(x), model.first.weight))
    return out


OTHERWISE: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...], str]] = {
    "twice": (lambda model, x: model.second(model.first(model.first(x).tanh())), (5,), "first.* called more than once"),
    "also as a weight": (weight_twice, (5,), "first.* used outside of its layer"),
    "only as a weight": (lambda model, x: model.second(F.linear(x, model.first.weight)), (5,), "first.* used outside"),
    "in vain": (
        lambda model, x: model.second(F.linear(x, model.first.weight) + 0 * model.first(x).detach()),
        (5,),
        "first.* used outside of its layer",
    ),
    "penalty": (lambda model, x: model.second(x) * model.second.bias.exp(), (5,), "second.* used outside of its layer"),
    "sequence first": (
        lambda model, x: model.second(model.first(x.transpose(0, 1)).tanh())[-1],
        (4, 5),
        "the loss of one example depends on others",
    ),
    "centred by the batch": (
        lambda model, x: model.second(model.first(x - x.mean(0)).tanh()),
        (5,),
        "the loss of one example depends on others",
    ),
    "the same for all": (
        lambda model, x: model.second(x + model.first(x.new_ones(2, 5)).sum(0)),
        (5,),
        "rows for each example",
    ),
}


@pytest.mark.parametrize("chunk_size", [2, 16])
@pytest.mark.parametrize("name", list(OTHERWISE))
def test_ways_that_need_more_are_as_exact_and_said(name: str, chunk_size: int) -> None:
    way, shape, told = OTHERWISE[name]
    said = expect_equal(Ways(way).double(), batch_of(*shape, examples=4), chunk_size=chunk_size)
    assert any(re.search(told, each) for each in said), said


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    model[2].weight = model[0].weight
    return model


def computed_weight() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 7)), nn.Tanh(), nn.Linear(7, 3))


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


COPIED: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "tied": (tied, {"0.weight"}),
    "computed": (computed_weight, {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1"}),
    "subclass": (lambda: nn.Sequential(Scaled(5, 4), nn.Linear(4, 3)), {"0.weight", "0.bias"}),
    "norm": (lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)), {"1.weight", "1.bias"}),
    "all": (lambda: nn.Bilinear(5, 5, 3), {"weight", "bias"}),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("chunk_size", [2, 16])
@pytest.mark.parametrize("name", list(COPIED))
def test_parameters_of_other_layers_are_copied(name: str, chunk_size: int) -> None:
    build, copied = COPIED[name]

    def loss(model: Callable[..., Any], batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[0]) if name == "all" else model(batch[0]), batch[1])

    said = " ".join(expect_equal(build().double(), batch_of(5), loss, chunk_size))
    names = said.replace(",", "").split()
    assert copied <= set(names)
    assert "2.weight" not in names


def test_operations_in_place_behind_layers_of_a_model_that_is_called_for_each_example() -> None:
    layers = nn.Conv1d(4, 6, 3), nn.ReLU(inplace=True), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(42, 3)
    (said,) = expect_equal(nn.Sequential(*layers).double(), batch_of(4, 9))
    assert "copy of 2.weight, 2.bias to" in said


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_residual_networks_and_transformers() -> None:
    model = ResNet(3, 3, width=8).double()
    said = expect_equal(model, batch_of(3, 8, 8, examples=3))
    assert all("GroupNorm" in each for each in said)
    ids = torch.randint(0, 7, (3, 4))

    def loss(model: Callable[..., Any], batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    said = expect_equal(CharTransformer(7, 4, width=8, heads=2, layers=1).double(), (ids, ids.roll(1, 1)), loss)
    assert "blocks.0.qkv.weight" not in " ".join(said)


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_frozen_parameters(frozen: str) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model.get_parameter(frozen).requires_grad_(False)
    assert expect_equal(model, batch_of(5)) == []


def test_losses_that_are_no_mean_over_the_batch_are_still_those_of_one_example() -> None:
    def summed(model: Callable[..., Any], batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum").square()

    assert expect_equal(MLP([5, 4, 3]).double(), batch_of(5), summed) == []

    def of_some_tokens(model: Callable[..., Any], batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=0)

    model, labels = nn.Linear(5, 3).double(), torch.tensor([[1, 0, 0, 0], [2, 1, 1, 2], [1, 2, 0, 0]])
    assert expect_equal(model, (batch_of(4, 5, examples=3)[0], labels), of_some_tokens) == []


def test_a_model_that_the_loss_calls_twice_or_with_something_else() -> None:
    def twice(model: Callable[..., Any], batch: Batch) -> Tensor:
        other: Tensor = model(-batch[0]).square().mean()
        return loss_of(model, batch) + other

    def both(model: Callable[..., Any], batch: Batch) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(torch.cat([inputs, -inputs]))[:1], labels)

    model, batch = nn.Sequential(nn.Linear(5, 3)).double(), batch_of(5)
    assert "more than once" in expect_equal(model, batch, twice)[0]
    assert "something else than a batch of one" in expect_equal(model, batch, both)[0]


def test_a_model_may_give_several_things_and_take_them() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: dict[str, Tensor], *, scale: float) -> dict[str, Any]:
            x["x"].mul_(1.0)
            return {"nothing": None, "out": [scale * self.layer(x["x"])], "name": "some"}

    def loss(model: Callable[..., Any], batch: Batch) -> Tensor:
        found = model({"x": batch[0]}, scale=2.0)
        assert found["name"] == "some"
        assert len(found["out"][0]) == 1
        return F.cross_entropy(found["out"][0], batch[1])

    assert expect_equal(Several().double(), batch_of(5), loss) == []


def test_every_new_shape_is_looked_at() -> None:
    """Of sequences of one, the first dimension may be either."""

    def way(model: Any, x: Tensor) -> Tensor:
        rows = model.first(x.transpose(0, 1).flatten(0, 1)).tanh()
        out: Tensor = model.second(rows).unflatten(0, (x.shape[1], x.shape[0])).sum(0)
        return out

    model = Ways(way).double()
    probe = measure(model, batch_of(1, 5, examples=4))
    assert probe.remarks() == []
    probe.begin(1)
    probe.before(batch := batch_of(4, 5, examples=4))
    expected = by_torch_func(model, loss_of, batch).square().sum(1)
    torch.testing.assert_close(probe.sqnorms(), expected)
    assert "depends on others" in probe.remarks()[0]


def test_single_precision_to_rounding() -> None:
    model = LeNet(1, 12, 3)
    inputs, labels = batch_of(1, 12, 12)
    batch = inputs.float(), labels
    expected = by_torch_func(model, loss_of, batch)
    probe = measure(model, batch, exact=True)
    torch.testing.assert_close(torch.stack(probe.images()), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(probe.sqnorms(), expected.double().square().sum(1), rtol=1e-5, atol=0)


def test_norms_alone_form_no_gradient_of_a_linear_layer() -> None:
    model = MLP([50, 60, 3]).double()
    probe = Probe(unit=Example(loss_of))
    probe.attach(model, trainable(model), frozenset({Need.VARIANCE}))
    probe.begin(1)
    probe.before(batch_of(50))  # checks that new shape
    with Allocations() as seen:
        probe.before(batch_of(50))
    assert seen.largest == 8 * 50 * 60  # the weight itself, transposed


class Heard:
    patient = False

    def __init__(self) -> None:
        self.remarks: list[str] = []

    def record(self, event: Event) -> None:
        if isinstance(event, Remark):
            self.remarks.append(event.text)

    def close(self) -> None:
        pass


def test_the_record_says_what_is_copied() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    heard, probe = Heard(), Probe(always=True, unit=Example(loss_of))
    with pl.Run(model, optimizer, TensorDataset(*batch_of(5)), batch=3, probe=probe, record=[heard]) as run:
        for step in run.steps(steps=2):
            optimizer.zero_grad()
            for batch in step:
                step.backward(loss_of(model, batch))
            optimizer.step()
    assert heard.remarks == [
        "each example gets a copy of 1.weight, 1.bias to differentiate by, since '1' (LayerNorm) is no plain Linear or "
        "convolution"
    ]
