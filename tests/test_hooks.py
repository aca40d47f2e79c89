"""The learning-rate rule multiplies the user's rate, or the gradient, during a step, and leaves no setting changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.lr import Scales
from paceline.optim import AdaGradNorm
from paceline.records import Progress
from paceline.roles import LearningRate

BATCH = 8
RULES = pytest.mark.parametrize(("rule", "factor"), [(pl.lr.Constant(), 1.0), (pl.lr.Linear(4), 2.0)])
DATA = TensorDataset(torch.randn(32, 3, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 2)


class Halving(Optimizer):
    """Plain descent that halves its own rate in every step, and fails once if told so."""

    fails = False

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise ArithmeticError("this step")
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad)
            group["lr"] = group["lr"] / 2


def applied(optimizer: Optimizer, model: nn.Module, rule: LearningRate, steps: int = 3) -> list[float]:
    """The rates with which the optimizer has stepped in a run."""
    found: list[float] = []
    with pl.Run(model, optimizer, DATA, batch=BATCH, lr=rule) as run:
        handle = optimizer.register_step_pre_hook(lambda *_: found.append(float(optimizer.param_groups[0]["lr"])))
        for step in run.steps(steps=steps):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            try:
                optimizer.step()
            except ArithmeticError:
                optimizer.step()
        handle.remove()
    return found


@RULES
@pytest.mark.parametrize("make", [lambda o: ExponentialLR(o, 0.5), lambda o: LambdaLR(o, lambda at: 0.5**at)])
@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
def test_a_scheduler_in_a_hook_of_before_works_on_the_users_rate(
    rule: LearningRate, factor: float, make: Callable[[SGD], LRScheduler], rate: float | Tensor
) -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=rate.clone() if isinstance(rate, Tensor) else rate)
    scheduler = make(optimizer)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    assert applied(optimizer, model, rule) == [factor, factor / 2, factor / 4]
    assert float(optimizer.param_groups[0]["lr"]) == 0.125


@RULES
def test_what_the_optimizer_makes_of_its_rate_stays(rule: LearningRate, factor: float) -> None:
    model = nn.Linear(3, 2)
    optimizer = Halving(model.parameters(), lr=1.0)
    assert applied(optimizer, model, rule) == [factor, factor / 2, factor / 4]
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_step_that_fails_and_is_done_again_has_the_factor_once() -> None:
    model = nn.Linear(3, 2)
    optimizer = Halving(model.parameters(), lr=1.0)
    optimizer.fails = True
    assert applied(optimizer, model, pl.lr.Linear(4), steps=1) == [2.0, 2.0]
    assert optimizer.param_groups[0]["lr"] == 0.5


class Threefold:
    """Multiplies the gradient by three."""

    scales = Scales.GRADIENT

    def factor(self, progress: Progress, batch: int) -> float:
        return 3.0


def trained(make: Callable[[Iterable[Tensor]], Optimizer], rule: LearningRate, by_hand: float) -> nn.Module:
    """After three steps; ``by_hand``, what the user multiplies gradients by."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    with pl.Run(model, optimizer, DATA, batch=BATCH, lr=rule) as run:
        for step in run.steps(steps=3):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad *= by_hand
            optimizer.step()
    return model


@pytest.mark.parametrize("make", [Adagrad, AdaGradNorm, SGD])
def test_a_rule_for_gradients_multiplies_them_and_weight_decay(make: type[Optimizer]) -> None:
    given: list[Optimizer] = []

    def ours(parameters: Iterable[Tensor]) -> Optimizer:
        given.append(make(parameters, lr=0.1, weight_decay=0.1))  # type: ignore[call-arg]
        return given[0]

    found = trained(ours, Threefold(), 1.0)
    assert given[0].param_groups[0]["weight_decay"] == 0.1
    assert given[0].param_groups[0]["lr"] == 0.1
    expected = trained(lambda ps: make(ps, lr=0.1, weight_decay=0.3), pl.lr.Constant(), 3.0)  # type: ignore[call-arg]
    for mine, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_gradients_of_a_step_that_fails_and_is_done_again_have_the_factor_once() -> None:
    def failing(parameters: Iterable[Tensor]) -> Halving:
        optimizer = Halving(parameters, lr=0.1)
        optimizer.fails = True
        return optimizer

    def once(rule: LearningRate, make: Callable[[Iterable[Tensor]], Halving]) -> nn.Linear:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        applied(make(model.parameters()), model, rule)
        return model

    first, again = once(Threefold(), lambda ps: Halving(ps, lr=0.1)), once(Threefold(), failing)
    torch.testing.assert_close(first.weight, again.weight, rtol=0, atol=0)
    plain = once(pl.lr.Constant(), lambda ps: Halving(ps, lr=0.1))
    assert not torch.equal(first.weight, plain.weight)


def test_a_gradient_that_is_kept_has_the_factor_in_each_step_alone() -> None:
    """Whoever adds gradients up over several steps adds up what the backward passes gave."""

    def kept(rule: LearningRate) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = SGD(model.parameters(), lr=0.0)  # so that both have the same gradients
        optimizer.zero_grad()
        with pl.Run(model, optimizer, DATA, batch=BATCH, lr=rule) as run:
            for step in run.steps(steps=3):
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
                optimizer.step()
        assert model.weight.grad is not None
        return model.weight.grad

    torch.testing.assert_close(kept(Threefold()), kept(pl.lr.Constant()), rtol=0, atol=0)


@pytest.mark.parametrize("rule", [pl.lr.Linear(4), Threefold()])
def test_a_step_that_fails_and_is_given_up_leaves_no_factor(rule: LearningRate) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    scheduler = LambdaLR(optimizer, lambda at: 0.5**at)

    def guard(*_: Any) -> None:
        if step.index in (1, 4):  # in between, and at the end
            raise ArithmeticError("this step")

    rates = []
    with pl.Run(model, optimizer, DATA, batch=BATCH, lr=rule) as run:
        optimizer.register_step_pre_hook(guard)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"optimizer.step\(\) was not called in step 1")
            for step in run.steps(steps=5):
                optimizer.zero_grad()
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
                with suppress(ArithmeticError):
                    optimizer.step()
                rates.append(run.replica.learning_rate)
                scheduler.step()
    factor = rule.factor(Progress(), BATCH)
    assert rates == [factor * 0.5**at for at in range(5)]
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.5**5, 0.5)


@pytest.mark.parametrize("scales", ["gradient", None, Scales])
def test_what_a_rule_scales_is_checked(scales: object) -> None:
    rule = Threefold()
    rule.scales = scales  # type: ignore[assignment]
    model = nn.Linear(3, 2)
    with pytest.raises(pl.SettingError, match=r"scales .* must be lr.Scales.RATE or"):
        pl.Run(model, SGD(model.parameters(), lr=0.1), DATA, batch=BATCH, lr=rule)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adafactor])
def test_optimizers_that_divide_by_the_gradient_are_refused(make: type[Optimizer]) -> None:
    model = nn.Linear(3, 2)
    rule = pl.lr.AdaScale(base=4, scales=Scales.GRADIENT)
    with pytest.raises(pl.SettingError, match=rf"by which {make.__name__} divides.*leave scales out"):
        pl.Run(model, make(model.parameters()), DATA, batch=BATCH, lr=rule, micro=2)  # type: ignore[call-arg]
