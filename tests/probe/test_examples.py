from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import LoopError, SettingError
from paceline.probe import Example, MicroBatch, Probe, between_unit_variance

from .models import (
    VARIANCE,
    Allocations,
    cut,
    drive,
    expect,
    flat_gradients,
    loss_of,
    small_batch,
    small_model,
    trainable,
)


def attached(model: nn.Module, unit: Example, **settings: Any) -> Probe:
    probe = Probe(unit=unit, **settings)
    probe.attach(model, trainable(model), VARIANCE)
    return probe


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 16])
@pytest.mark.parametrize("sizes", [[6], [4, 2]])
def test_units_are_the_gradients_of_single_examples(chunk_size: int, sizes: list[int]) -> None:
    model, batch = small_model(), small_batch(6)
    probe = attached(model, Example(loss_of, chunk_size=chunk_size), exact=True)
    drive(probe, model, cut(batch, sizes))
    each = flat_gradients(model, cut(batch, [1] * 6))
    assert torch.equal(probe.weights(), torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(probe.sqnorms(), each.square().sum(1))
    torch.testing.assert_close(probe.gram(), each @ each.T)
    expect(probe, 6, float(each.square().sum()))
    variance = between_unit_variance([1.0] * 6, probe.sqnorms().tolist(), probe.mean_sqnorm(1.0))
    assert variance == pytest.approx(float(each.var(0, correction=1).sum()))


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_chunks_bound_the_memory(chunk_size: int) -> None:
    model, batch = small_model(), small_batch(40)
    probe = attached(model, Example(loss_of, chunk_size=chunk_size))
    with Allocations() as seen:
        probe.before(batch)
    assert probe.numbers()[0] == 40
    gradient_bytes = 8 * sum(parameter.numel() for parameter in model.parameters())
    assert 0 < seen.largest <= chunk_size * gradient_bytes


def test_norms_are_exact_even_with_a_short_sketch() -> None:
    model, batch = small_model(), small_batch(5)
    probe = attached(model, Example(loss_of), size=1)
    drive(probe, model, [batch])
    each = flat_gradients(model, cut(batch, [1] * 5))
    expect(probe, 5, float(each.square().sum()))


def test_the_users_gradients_are_not_touched() -> None:
    model, batch = small_model(), small_batch(5)
    probe = attached(model, Example(loss_of))
    probe.begin(1)
    probe.before(batch)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_step_begins_anew() -> None:
    model = small_model()
    probe = attached(model, Example(loss_of))
    for _ in range(2):
        drive(probe, model, [small_batch(5)])
        assert probe.numbers()[0] == 5


class Pair(NamedTuple):
    inputs: dict[str, Tensor]
    labels: list[Tensor]
    temperature: Tensor
    name: str


def test_batches_may_be_nested_and_hold_other_things() -> None:
    model, (inputs, labels) = small_model(), small_batch(4)

    def nested(model: Callable[..., Any], batch: Pair) -> Tensor:
        assert batch.name == "some"
        assert len(batch.inputs["x"]) == 1
        return F.cross_entropy(model(batch.inputs["x"]) / batch.temperature, batch.labels[0])

    probe = attached(model, Example(nested))
    probe.begin(1)
    probe.before(Pair({"x": inputs}, [labels], torch.tensor(1.0), "some"))
    each = flat_gradients(model, cut((inputs, labels), [1] * 4))
    torch.testing.assert_close(probe.sqnorms(), each.square().sum(1))


def test_frozen_parameters_are_left_out() -> None:
    model = small_model()
    for parameter in model[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    batch = small_batch(3)
    probe = attached(model, Example(loss_of))
    drive(probe, model, [batch])
    each = flat_gradients(model, cut(batch, [1] * 3))
    assert each.shape[1] == 7 * 3 + 3
    torch.testing.assert_close(probe.sqnorms(), each.square().sum(1))


def test_tied_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    model[2].weight = model[0].weight
    batch = small_batch(3)
    probe = attached(model, Example(loss_of))
    drive(probe, model, [batch])
    each = flat_gradients(model, cut(batch, [1] * 3))
    assert each.shape[1] == 25 + 5 + 5
    torch.testing.assert_close(probe.sqnorms(), each.square().sum(1))


def test_dropout_draws_the_same_numbers_as_without_a_probe() -> None:
    model = nn.Sequential(nn.Linear(5, 50), nn.Dropout(0.5), nn.Linear(50, 3)).double()
    batch = small_batch(6)
    probe = attached(model, Example(loss_of))
    torch.manual_seed(3)
    expected = model(batch[0])
    torch.manual_seed(3)
    probe.begin(1)
    probe.before(batch)
    assert torch.equal(model(batch[0]), expected)
    # ... and each example has a mask of its own: equal examples have different gradients.
    probe.begin(1)
    probe.before((batch[0][:1].expand(6, 5), batch[1][:1].expand(6)))
    assert len(set(probe.sqnorms().tolist())) == 6


def with_norm(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(5, 8), layer), nn.Flatten(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False), nn.SyncBatchNorm(8)]
)
def test_batch_norm_is_refused_by_name_with_the_remedy(layer: nn.Module) -> None:
    with pytest.raises(SettingError, match=r"'0\.1' \((Sync)?BatchNorm.*GroupNorm.*MicroBatch\(\)"):
        attached(with_norm(layer), Example(loss_of))


def test_batch_norm_is_refused_at_use_when_training_mode_came_later() -> None:
    model = with_norm(nn.BatchNorm1d(8)).eval()
    probe = attached(model, Example(loss_of))
    probe.begin(1)
    probe.before(small_batch(3))
    assert probe.numbers()[0] == 3
    model.train()
    with pytest.raises(SettingError, match=r"'0\.1'"):
        probe.before(small_batch(3))


def test_batch_norm_without_running_statistics_is_refused_in_eval_mode_too() -> None:
    with pytest.raises(SettingError, match=r"'0\.1'"):
        attached(with_norm(nn.BatchNorm1d(8, track_running_stats=False)).eval(), Example(loss_of))


def test_batch_norm_is_fine_for_micro_batches_and_group_norm_for_examples() -> None:
    Probe(unit=MicroBatch()).attach(with_norm(nn.BatchNorm1d(8)), [], VARIANCE)
    model = with_norm(nn.GroupNorm(2, 8))
    probe = attached(model, Example(loss_of))
    batch = small_batch(4)
    drive(probe, model, [batch])
    torch.testing.assert_close(probe.sqnorms(), flat_gradients(model, cut(batch, [1] * 4)).square().sum(1))


def test_instance_norm_with_running_statistics_is_refused() -> None:
    with pytest.raises(SettingError, match=r"'0\.1' \(InstanceNorm1d\).*track_running_stats=False"):
        attached(with_norm(nn.InstanceNorm1d(8, track_running_stats=True)), Example(loss_of))


def test_a_weight_that_is_not_the_number_of_examples_is_refused() -> None:
    model, batch = small_model(), small_batch(4)
    probe = attached(model, Example(loss_of))
    probe.begin(1)
    probe.before(batch)
    probe.before_backward()
    with pytest.raises(LoopError, match="weight 17 for 4 examples"):
        probe.after_backward(17.0, 1.0)


def test_a_loss_that_vmap_cannot_follow_says_where() -> None:
    def stubborn(model: Callable[..., Any], batch: Any) -> Tensor:
        loss = loss_of(model, batch)
        return loss if loss.item() > 0 else -loss

    model = small_model()
    probe = attached(model, Example(stubborn))
    with pytest.raises(RuntimeError) as caught:
        probe.before(small_batch(2))
    assert "unit=MicroBatch()" in caught.value.__notes__[0]


def test_batches_whose_examples_cannot_be_told_apart_are_refused() -> None:
    probe = attached(small_model(), Example(loss_of))
    with pytest.raises(SettingError, match=r"leading dimensions \[2, 3\]"):
        probe.before((torch.zeros(3, 5), torch.zeros(2)))


def test_parameters_of_something_else_are_refused() -> None:
    model = small_model()
    with pytest.raises(SettingError, match="1 of 5 parameters do not belong"):
        Probe(unit=Example(loss_of)).attach(model, [*trainable(model), nn.Parameter(torch.ones(1))], VARIANCE)


def test_chunks_hold_at_least_one_example() -> None:
    with pytest.raises(SettingError, match=r"chunk_size \(0\)"):
        Example(loss_of, chunk_size=0)
