from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.tasks import MLP, CharTransformer, LeNet, ResNet, Translator


def images(channels: int, side: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(3, channels, side, side)


def text() -> Tensor:
    return torch.randint(0, 65, (3, 64))


def pairs() -> Tensor:
    ids = torch.randint(1, 40, (3, 2, 12))
    ids[0, 0, 5:] = 0
    return ids


CASES = {
    "mlp": (lambda: MLP([64, 32, 10]), images(1, 8), (3, 10)),
    "lenet-8": (lambda: LeNet(1, 8, 10), images(1, 8), (3, 10)),
    "lenet-28": (lambda: LeNet(1, 28, 10), images(1, 28), (3, 10)),
    "lenet-32": (lambda: LeNet(3, 32, 10), images(3, 32), (3, 10)),
    "resnet-28": (lambda: ResNet(1, 10), images(1, 28), (3, 10)),
    "resnet-32": (lambda: ResNet(3, 10), images(3, 32), (3, 10)),
    "resnet-deep": (lambda: ResNet(3, 10, width=16, blocks=3), images(3, 32), (3, 10)),
    "transformer": (lambda: CharTransformer(65, 64), text, (3, 64, 65)),
    "translator": (lambda: Translator(50, 40, 12), pairs, (3, 12, 40)),
}
every_model = pytest.mark.parametrize(("make", "data", "shape"), CASES.values(), ids=CASES)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@every_model
def test_shapes(make: Callable[[], nn.Module], data: Callable[[], Tensor], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits = make()(data())
    assert logits.shape == shape
    assert logits.dtype == torch.float32


@every_model
def test_weights_follow_the_seed(
    make: Callable[[], nn.Module], data: Callable[[], Tensor], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(7)
    first = make()
    torch.manual_seed(7)
    second = make()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@every_model
def test_every_example_is_treated_alone(
    make: Callable[[], nn.Module], data: Callable[[], Tensor], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model, inputs = make(), data()
    together = model(inputs)
    alone = torch.cat([model(inputs[i : i + 1]) for i in range(len(inputs))])
    # float32 matrix products of other shapes add in another order; logits are of size 1
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@every_model
def test_every_parameter_gets_a_gradient_and_nothing_else_has_state(
    make: Callable[[], nn.Module], data: Callable[[], Tensor], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = make()
    model(data()).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    assert not list(model.buffers())


def test_sizes_are_as_documented() -> None:
    assert parameters(ResNet(3, 10)) == pytest.approx(0.31e6, rel=0.01)
    assert parameters(CharTransformer(65, 64)) == pytest.approx(0.42e6, rel=0.01)
    assert parameters(Translator(3000, 3000, 32)) == pytest.approx(2.1e6, rel=0.01)


def test_the_mlp_is_linear_layers_with_relu() -> None:
    torch.manual_seed(0)
    model, inputs = MLP([4, 3, 2]), torch.randn(5, 2, 2)
    first, last = model.layers
    torch.testing.assert_close(model(inputs), last(F.relu(first(inputs.view(5, 4)))), rtol=0, atol=0)


def test_the_transformer_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = CharTransformer(65, 16)
    ids = torch.randint(0, 65, (1, 16))
    changed = ids.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 65
    difference = (model(ids) - model(changed)).abs().amax((0, 2))  # by position
    assert difference[:9].max() == 0
    assert difference[9:].min() > 0


def test_the_transformer_knows_positions_and_reads_shorter_texts() -> None:
    torch.manual_seed(0)
    model = CharTransformer(65, 16)
    logits = model(torch.zeros(1, 5, dtype=torch.long))
    assert logits.shape == (1, 5, 65)
    assert not torch.allclose(logits[0, 0], logits[0, 1])


def test_the_translator_does_not_look_ahead_and_reads_all_of_the_sentence() -> None:
    torch.manual_seed(0)
    model = Translator(50, 40, 12)
    ids = torch.randint(1, 40, (1, 2, 12))
    logits = model(ids)
    for side, unchanged in ((1, 7), (0, 0)):  # the word that is changed: of the translation, of the sentence
        changed = ids.clone()
        changed[0, side, 7] = changed[0, side, 7] % 39 + 1
        difference = (model(changed) - logits).abs().amax((0, 2))  # by position
        assert (difference[:unchanged] == 0).all()
        assert (difference[unchanged:] > 0).all()


def test_the_translator_does_not_see_what_is_behind_a_sentence() -> None:
    torch.manual_seed(0)
    model = Translator(50, 40, 12)
    ids = torch.randint(1, 40, (1, 2, 12))
    ids[0, 0, 7:] = 0
    # other sums of float32, of logits of size 1
    torch.testing.assert_close(model(ids)[:, :7], model(ids[:, :, :7]), rtol=1e-4, atol=1e-5)
