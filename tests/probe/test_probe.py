from __future__ import annotations

import math

import pytest
import torch

import paceline.probe
from paceline.errors import LoopError, SettingError
from paceline.probe import Example, Probe

from .models import VARIANCE, Allocations, cut, drive, loss_of, small_batch, small_model, trainable


@pytest.mark.parametrize("unit", [None, Example(loss_of)])
def test_nothing_is_done_as_long_as_nobody_asks(unit: Example | None) -> None:
    model = small_model()
    probe = Probe() if unit is None else Probe(unit=unit)
    assert not probe.active
    probe.attach(model, trainable(model), frozenset())
    assert not probe.active
    with Allocations() as seen:
        probe.begin(1)
        probe.before(small_batch(2))
    before = seen.operations  # small_batch's own
    with Allocations() as seen_alone:
        small_batch(2)
    assert before == seen_alone.operations
    with Allocations() as seen:
        probe.before_backward()
        probe.see_bucket(trainable(model), [])
        probe.after_backward(2.0, 1.0)
        probe.after_backward(2.0, 1.0)
        assert probe.numbers() == (0, 0.0)
        assert math.isnan(probe.mean_sqnorm(1.0))
    assert seen.operations == 0
    for ask in (probe.gram, probe.sqnorms, probe.weights):
        with pytest.raises(LoopError, match=r"Probe\(always=True\)"):
            ask()


def test_a_need_or_always_makes_it_measure() -> None:
    model = small_model()
    for probe, needs in ((Probe(), VARIANCE), (Probe(always=True), frozenset())):
        probe.attach(model, trainable(model), needs)
        assert probe.active
        drive(probe, model, cut(small_batch(4), [2, 2]))
        assert probe.numbers()[0] == 2
        assert probe.numbers()[1] > 0


def test_it_can_serve_another_run() -> None:
    probe = Probe()
    for seed in (0, 1):
        model = small_model(seed)
        probe.attach(model, trainable(model), VARIANCE)
        assert probe.numbers() == (0, 0.0)
        drive(probe, model, cut(small_batch(4), [2, 2]))
        probe.detach()
    probe.attach(model, trainable(model), frozenset())
    assert not probe.active


def test_mean_sqnorm_is_that_of_the_unscaled_gradient() -> None:
    model = small_model()
    parameters = trainable(model)
    probe = Probe()
    probe.attach(model, parameters, VARIANCE)
    parameters[0].grad = torch.full_like(parameters[0], 8.0)
    assert probe.mean_sqnorm(4.0) == pytest.approx(4.0 * parameters[0].numel())


def test_settings_that_cannot_be_or_have_no_effect_are_refused() -> None:
    with pytest.raises(SettingError, match=r"sketch size \(0\)"):
        Probe(size=0)
    with pytest.raises(SettingError, match="exact=True makes no sketch"):
        Probe(exact=True, size=512)
    with pytest.raises(SettingError, match="exact=True makes no sketch"):
        Probe(exact=True, seed=1)


def test_parameters_on_several_devices_are_refused() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1, device="meta"))]
    with pytest.raises(SettingError, match="on one device"):
        Probe().attach(torch.nn.Module(), parameters, VARIANCE)


def test_complex_parameters_are_refused() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))]
    with pytest.raises(SettingError, match="complex parameters; hold their real and"):
        Probe().attach(torch.nn.Module(), parameters, VARIANCE)
    Probe().attach(torch.nn.Module(), parameters, frozenset())


def test_sparse_gradients_are_refused() -> None:
    model = torch.nn.EmbeddingBag(5, 2, sparse=True)
    probe = Probe()
    probe.attach(model, trainable(model), VARIANCE)
    probe.begin(1)
    probe.before_backward()
    model(torch.tensor([[1, 2]])).sum().backward()
    probe.after_backward(1.0, 1.0)
    with pytest.raises(SettingError, match="build its layer with sparse=False"):
        probe.numbers()


def test_public_names() -> None:
    assert sorted(paceline.probe.__all__) == list(paceline.probe.__all__)
    for name in paceline.probe.__all__:
        assert getattr(paceline.probe, name).__doc__
