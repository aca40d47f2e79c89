"""What the probe finds of single examples, beside plain ``torch.func``; and which weights were listened to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from paceline.probe import Example, Probe, SignSketch
from paceline.probe.parts import Part
from paceline.probe.taps import Taps
from paceline.roles import Need

from .models import loss_of, trainable

EVERYTHING = frozenset({Need.VARIANCE, Need.UNITS, Need.COORDINATES})
Loss = Callable[[Callable[..., Any], Any], Tensor]

# Double precision: sums of a few thousand products, in another order.
CLOSE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}


def by_torch_func(model: nn.Module, loss: Loss, batch: tuple[Tensor, ...]) -> Tensor:
    """(B, d): each example's gradient."""
    values = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}

    def loss_of_one(values: dict[str, Tensor], *example: Tensor) -> Tensor:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return functional_call(model, values, args, kwargs)

        return loss(stand_in, tuple(each.unsqueeze(0) for each in example))

    in_dims = (None, *(0 for _ in batch))
    found = vmap(grad(loss_of_one), in_dims, randomness="different")(values, *batch)
    return torch.cat([each.reshape(len(each), -1) for each in found.values()], 1)


def measure(
    model: nn.Module, batch: Any, loss: Loss = loss_of, chunk_size: int = 16, *, seed: int = 3, **settings: Any
) -> Probe:
    probe = Probe(unit=Example(loss, chunk_size), **settings)
    probe.attach(model, trainable(model), EVERYTHING)
    probe.begin(1)
    torch.manual_seed(seed)
    probe.before(batch)
    assert not any("forward" in vars(layer) for layer in model.modules() if type(layer) in (nn.Linear, nn.Conv2d))
    return probe


class Ear:
    """Notes which weights were heard of, and in which passes that was refused."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.heard: set[str] = set()
        self.passes: list[Taps] = []
        made, parts = Taps.__init__, Taps.parts

        def make(taps: Taps, *args: Any) -> None:
            made(taps, *args)
            self.passes.append(taps)

        def listen(taps: Taps, inputs: list[Tensor], deltas: list[Tensor]) -> dict[str, list[Part]]:
            found = parts(taps, inputs, deltas)
            self.heard |= found.keys()
            return found

        patch.setattr(Taps, "__init__", make)
        patch.setattr(Taps, "parts", listen)

    @property
    def refused(self) -> bool:
        return any(taps.refused for taps in self.passes)


def expect_equal(
    model: nn.Module, batch: tuple[Tensor, ...], loss: Loss = loss_of, chunk_size: int = 16, seed: int = 3
) -> None:
    """Images, norms and squares are those of torch.func."""
    torch.manual_seed(seed)
    expected = by_torch_func(model, loss, batch)
    probe = measure(model, batch, loss, chunk_size, seed=seed, exact=True)
    torch.testing.assert_close(torch.stack(list(probe.images())), expected, **CLOSE)
    torch.testing.assert_close(probe.sqnorms(), expected.square().sum(1), **CLOSE)
    squares = torch.cat([each.flatten() for each in probe.squares()])
    torch.testing.assert_close(squares, expected.square().sum(0), **CLOSE)
    sketched = measure(model, batch, loss, chunk_size, seed=seed, size=97)
    images = torch.stack([SignSketch(len(each), 97, dtype=torch.float64).of([each], [0]) for each in expected])
    torch.testing.assert_close(torch.stack(list(sketched.images())), images, **CLOSE)


def batch_of(*shape: int, classes: int = 3, examples: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(examples, *shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, classes, (examples,), generator=generator)


class Ways(nn.Module):
    """A model of two linear layers that are used in some way."""

    def __init__(self, way: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 3)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.way(self, x)
        return out
