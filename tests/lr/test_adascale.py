"""AdaScale's gain and its steps, and torch's schedulers by other clocks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import paceline as pl
from paceline.lr import AdaScale, Linear, Pace, SquareRoot, gain
from paceline.optim import AdaGradNorm
from paceline.records import GradientStats, Note, Plan, Progress, Round

positive = st.floats(1e-6, 1e6)


@given(positive, positive, st.integers(1, 500), st.integers(1, 200))
def test_the_gain_lies_between_one_and_the_scale(variance: float, signal: float, base: int, scale: int) -> None:
    found = gain(variance, signal, base, base * scale)
    assert 1 - 1e-9 <= found <= scale * (1 + 1e-9)
    assert gain(variance, signal, base, base) == 1.0


@given(positive, st.integers(1, 500), st.integers(2, 200))
def test_the_gain_in_the_limits(signal: float, base: int, scale: int) -> None:
    assert gain(signal * base * 1e12, signal, base, base * scale) == pytest.approx(scale, rel=1e-6)
    assert gain(signal * base * 1e-12, signal, base, base * scale) == pytest.approx(1.0, rel=1e-6)
    assert gain(0.0, 0.0, base, base * scale) == 1.0


def test_the_gain_is_the_papers_quotient_of_means() -> None:
    # (1/S) sum |g_i|^2 over |gbar|^2, each in the mean over many steps, for S small batches.
    scale, base, variance, draws = 8, 16, 50.0, 4000
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(30, generator=generator, dtype=torch.float64)
    noise = math.sqrt(variance / base / 30) * torch.randn(draws, scale, 30, generator=generator, dtype=torch.float64)
    small = truth + noise
    one, other = small.square().sum(2).mean(), small.mean(1).square().sum(1).mean()
    # 32,000 vectors of 30 numbers: a mean of squares is good to sqrt(2 / 960,000) = 0.15 %.
    assert gain(variance, float(truth @ truth), base, base * scale) == pytest.approx(float(one / other), rel=0.01)


def test_gradients_times_the_gain_leave_adagrad_with_the_sums_and_the_way_of_so_many_small_steps() -> None:
    # Gradients that do not depend on the place: what both add up and how far both go is known. 8,000 small steps.
    scale, base, variance, steps = 8, 16, 50.0, 8000
    generator = torch.Generator().manual_seed(1)
    truth = torch.randn(30, generator=generator, dtype=torch.float64)

    def go(batch: int, count: int, factor: float) -> tuple[float, Tensor]:
        place = nn.Parameter(torch.zeros(30, dtype=torch.float64))
        # So large a first sum that the rate hardly changes: the same part of it is added by both.
        optimizer = AdaGradNorm([place], lr=1.0, initial=1e9)
        deviation = math.sqrt(variance / batch / 30)
        for _ in range(count):
            noise = torch.randn(30, generator=generator, dtype=torch.float64)
            place.grad = factor * (truth + deviation * noise)
            optimizer.step()
        return float(optimizer.state[place]["sum"]) - 1e9, place.detach()

    worth = gain(variance, float(truth @ truth), base, base * scale)
    sums, way = go(base, steps, 1.0)
    fewer_sums, fewer_way = go(base * scale, round(steps / worth), worth)
    assert worth > 1.05
    # 8,000 squares of 30 numbers, some with cross terms: good to 0.5 %; the number of steps is rounded by 0.02 %.
    assert fewer_sums == pytest.approx(sums, rel=0.02)
    assert float((fewer_way - way).norm() / way.norm()) < 0.02


def a_round(batch: int, variance: float, signal: float, step: int, steps: int = 1) -> Round:
    stats = GradientStats(4, float(batch), variance, signal + variance / batch)
    note = Note(examples=batch * steps, weight=batch * steps, units=4, steps=steps)
    return Round(Plan(step, 0, (0,), (batch,), batch), (note,), stats)


def test_scale_invariant_steps_end_where_the_schedule_says() -> None:
    rule = AdaScale(base=32)
    gains = []
    for step in range(200):
        gains.append(rule.factor(Progress(step), 256))
        rule.stepped(256, 1)
        rule.observe(a_round(256, variance=3200.0, signal=20.0, step=step))
        if rule.steps >= 500:
            break
    assert gains[0] == 1.0  # nothing is known yet
    # (3200 / 32 + 20) / (3200 / 256 + 20) = 120 / 32.5
    assert gains[-1] == pytest.approx(120 / 32.5)
    assert len(gains) == math.ceil(1 + 499 / (120 / 32.5))
    assert rule.steps == pytest.approx(sum(gains))


def test_at_the_base_batch_it_does_nothing() -> None:
    rule = AdaScale(base=64)
    for step in range(10):
        assert rule.factor(Progress(step), 64) == 1.0
        rule.stepped(64, 1)
        rule.observe(a_round(64, variance=100.0 * step, signal=1.0, step=step))
    assert rule.steps == 10


def test_estimates_are_averaged_apart_and_without_a_bias_from_the_start() -> None:
    rule = AdaScale(base=8, smoothing=0.5)
    for step, (variance, signal) in enumerate([(10.0, 1.0), (30.0, -0.5)]):
        rule.observe(a_round(16, variance, signal, step))
    # Weights 1/3 and 2/3.
    assert rule.gain(16) == pytest.approx(gain(70 / 3, 0.0, 8, 16))
    rule.observe(a_round(16, math.nan, 1.0, 2))
    assert rule.gain(16) == pytest.approx(gain(70 / 3, 0.0, 8, 16))


def test_smoothing_is_the_papers_by_default() -> None:
    by_default, told = AdaScale(base=8), AdaScale(base=8, smoothing=1 - 16 / 8 / 1000)
    for step, (variance, signal) in enumerate([(10.0, 1.0), (30.0, 2.0), (5.0, 3.0)]):
        for rule in (by_default, told):
            rule.observe(a_round(16, variance, signal, step))
    assert by_default.gain(16) == told.gain(16)
    # Nearly the plain means at first.
    assert by_default.gain(16) == pytest.approx(gain(15.0, 2.0, 8, 16), rel=1e-3)


def test_steps_are_counted_with_the_gain_that_was_applied() -> None:
    rule = AdaScale(base=8)
    rule.stepped(16, 4)
    assert rule.steps == 4
    rule.observe(a_round(16, 10.0, 1.0, step=3, steps=4))
    rule.stepped(16, 1)
    rule.stepped(8, 1)
    assert rule.steps == pytest.approx(4 + gain(10.0, 1.0, 8, 16) + 1)


def test_power_is_for_adam() -> None:
    rule = AdaScale(base=8, power=0.5)
    rule.observe(a_round(32, 1e9, 1e-9, 0))
    assert rule.factor(Progress(), 32) == pytest.approx(2.0)


def test_state_is_taken_back() -> None:
    first, second = AdaScale(base=8), AdaScale(base=8)
    for step in range(3):
        first.observe(a_round(32, 10.0 + step, 1.0, step))
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.gain(32) == first.gain(32) != 1.0


def test_simple_rules() -> None:
    assert Linear(32).factor(Progress(), 128) == 4.0
    assert SquareRoot(32).factor(Progress(), 128) == 2.0


def plateau() -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))


def one_cycle() -> torch.optim.lr_scheduler.OneCycleLR:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=30, cycle_momentum=False)


def test_a_count_may_pass_the_end_of_a_schedule() -> None:
    scheduler, count = one_cycle(), 0.0
    pace = Pace(scheduler, lambda: count, last=29)
    for _ in range(5):
        scheduler.optimizer.step()
        count += 13
        pace.step()
    assert scheduler.last_epoch == 29
    assert scheduler.get_last_lr()[0] == pytest.approx(1.0 / 25 / 1e4)  # where OneCycleLR ends by its defaults


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AdaScale(base=0), "at least 1"),
        (lambda: AdaScale(base=8, smoothing=1.0), "below 1"),
        (lambda: AdaScale(base=8, power=2.0), "at most 1"),
        (lambda: AdaScale(base=8, scales="gradient"), "must be lr.Scales.RATE or"),  # type: ignore[arg-type]
        (lambda: Linear(-1), "at least 1"),
        (lambda: Pace("cosine", lambda: 0.0), r"scheduler \(str\) must be one of torch's"),  # type: ignore[arg-type]
        (
            lambda: Pace(plateau(), lambda: 0.0),
            r"scheduler \(ReduceLROnPlateau\) must be one of .* that take no metric",
        ),
        (lambda: Pace(one_cycle(), lambda: 0.0, last=0), "last .0. must be at least 1"),
    ],
)
def test_bad_settings(make: object, words: str) -> None:
    with pytest.raises(pl.SettingError, match=words):
        make()  # type: ignore[operator]


def test_a_scheduler_by_another_clock() -> None:
    def rates(pace: bool) -> list[float]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        count = 0.0
        paced = Pace(scheduler, lambda: count)
        found = []
        for at in range(20):
            optimizer.step()
            if pace:  # steps worth 0.5, 2, 0.5, 2 ... of the scheduler's
                count += 0.5 if at % 2 == 0 else 2.0
                paced.step()
            else:
                scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    plain, paced = rates(pace=False), rates(pace=True)
    counts = [2.5 * (at // 2) + (0.5 if at % 2 == 0 else 2.5) for at in range(16)]
    assert paced[:16] == [1.0 if count < 1 else plain[int(count) - 1] for count in counts]


def test_a_paces_state_is_the_schedulers_too() -> None:
    def make() -> tuple[Pace, torch.optim.Optimizer, list[float]]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        count = [0.0]
        return Pace(torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), lambda: count[0]), optimizer, count

    first, optimizer, count = make()
    count[0] = 4.7
    optimizer.step()
    first.step()
    second, other, count = make()
    second.load_state_dict(first.state_dict())
    other.load_state_dict(optimizer.state_dict())
    count[0] = 6.2
    other.step()
    second.step()
    assert other.param_groups[0]["lr"] == 0.25
