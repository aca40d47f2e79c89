"""Orders that balance gradients as the optimizer divides them: by hand, by many workers, on resume."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline as pl
from paceline import order, sync
from paceline.errors import SettingError
from paceline.order import MeanBalancer, PairBalancer, herding_bound
from paceline.probe import Example
from tests.laws.test_order import (
    EPOCHS,
    LENGTH,
    UNIT,
    Seen,
    collate,
    epoch_by_hand,
    growing,
    orders_of,
    resumed_at,
    seen_in_epochs,
    unequal,
)
from tests.pool import Pool
from tests.problems import data, flat, mlp, train

BATCH = 24
STEPS = 5  # of an epoch

ORDERS: dict[str, Callable[..., Any]] = {
    "pairs": order.PairBalance,
    "mean": order.GraB,
    "streams": lambda **more: order.PairBalance(streams=order.WorkerStreams(), **more),
    "walk": lambda **more: order.PairBalance(rule=order.Walk(limit=1.0), **more),
}


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": [first], "betas": (0.5, 0.9), "eps": 0.1}, {"params": others}]


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "Adam": lambda model: optim.Adam(model.parameters(), lr=0.02),
    "groups": lambda model: optim.Adam(in_groups(model), lr=0.02),
    "amsgrad": lambda model: optim.AdamW(model.parameters(), lr=0.02, amsgrad=True),
    "Adagrad": lambda model: optim.Adagrad(model.parameters(), lr=0.1),
    "RMSprop": lambda model: optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5),
}


def divisors(kind: str, optimizer: optim.Optimizer) -> Tensor | None:
    """sqrt(v) + eps of all numbers, as torch's documents say it."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state or state["step"] == 0:
                return None
            if kind in ("Adam", "groups", "amsgrad"):
                moment = state["max_exp_avg_sq"] if kind == "amsgrad" else state["exp_avg_sq"]
                moment = moment / (1 - group["betas"][1] ** state["step"].item())
            else:
                moment = state["sum" if kind == "Adagrad" else "square_avg"]
            found.append((moment.sqrt() + group["eps"]).reshape(-1))
    return torch.cat(found)


def by_hand(which: str, kind: str) -> tuple[Tensor, list[list[int]]]:
    """Whole gradients of micro-batches over what they are divided by when the epoch begins, in a plain loop."""
    model, dataset = mlp(dtype=torch.float64), Seen(LENGTH)
    optimizer = OPTIMIZERS[kind](model)
    drawn = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    units = [drawn[at : at + UNIT] for at in range(0, LENGTH, UNIT)]
    whole = len(units) - 1
    sequence, found = list(range(whole)), []
    make = PairBalancer if which == "pairs" else MeanBalancer
    balancer: PairBalancer | MeanBalancer = make([sequence])
    for epoch in range(EPOCHS):
        divisor = divisors(kind, optimizer)
        if epoch == 1:
            balancer = make([sequence])  # the mean of gradients that were not divided is none of those that are
        ordered = [units[at] for at in [*sequence, whole]]
        found.append(torch.cat(ordered).tolist())
        observe = partial(look, balancer, whole, divisor)
        epoch_by_hand(model, optimizer, dataset, ordered, observe)
        sequence = balancer.next_orders()[0]
    return flat(model), found


def look(balancer: PairBalancer | MeanBalancer, whole: int, divisor: Tensor | None, at: int, gradient: Tensor) -> None:
    """Examples that make no whole unit teach nothing."""
    if at != whole:
        balancer.observe((gradient if divisor is None else gradient / divisor)[None])


def build(which: str, kind: str = "Adam", **more: Any) -> tuple[pl.Run, Seen]:
    model, dataset = mlp(dtype=torch.float64), Seen(LENGTH)
    role = ORDERS[which](preconditioned=True)
    settings: dict[str, Any] = {"batch": BATCH, "micro": UNIT, "order": role, "collate_fn": collate, **more}
    return pl.Run(model, OPTIMIZERS[kind](model), dataset, **settings), dataset


def trained(
    which: str, kind: str, more: Callable[[], dict[str, Any]] = dict, preconditioned: bool = True
) -> tuple[Tensor, list[list[int]]]:
    """The parameters, and the examples of each epoch that this worker had."""
    role = ORDERS[which](exact=True, preconditioned=preconditioned)
    run, dataset = build(which, kind, order=role, probe=pl.Probe(exact=True), **more())
    with run:
        found = seen_in_epochs(run, dataset)
        return flat(run.model), found


@pytest.mark.parametrize("which", ["pairs", "mean"])
@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_one_worker_does_what_a_plain_loop_does(pool: Pool, which: str, kind: str) -> None:
    ((parameters, seen),) = pool.run(1, trained, which, kind)
    ((expected, seen_by_hand),) = pool.run(1, by_hand, which, kind)
    assert seen == seen_by_hand
    assert len({tuple(each) for each in seen}) == EPOCHS
    torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-9)
    ((_, plain),) = pool.run(1, trained, which, kind, dict, False)
    assert seen[:2] == plain[:2]  # the first epoch has balanced gradients as they are
    assert seen != plain


@pytest.mark.parametrize(
    ("which", "more", "workers"),
    [("pairs", dict, 2), ("pairs", unequal, 3), ("pairs", growing, 3), ("mean", unequal, 2)],
)
def test_any_split_equals_one_process(pool: Pool, which: str, more: Callable[[], dict[str, Any]], workers: int) -> None:
    ((expected, alone),) = pool.run(1, trained, which, "Adam", growing if more is growing else dict)
    found = pool.run(workers, trained, which, "Adam", more)
    for epoch in range(EPOCHS):
        assert sorted(one for _, seen in found for one in seen[epoch]) == list(range(LENGTH))
    assert len(alone) == EPOCHS
    for parameters, _ in found:
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-9)  # another order differs by far more


def wrapped(ddp: bool) -> list[list[int]]:
    run, _ = build("pairs")
    run.close()
    model = DistributedDataParallel(run.model) if ddp else run.model
    role = order.PairBalance(preconditioned=True)
    found = []
    with pl.Run(model, run.optimizer, Seen(LENGTH), batch=BATCH, micro=UNIT, order=role, collate_fn=collate) as second:
        for epoch in range(EPOCHS):
            train(second, model, epochs=epoch + 1)
            found.append(orders_of(second)[0])
    return found


def test_a_ddp_module_teaches_the_same(pool: Pool) -> None:
    assert pool.run(2, wrapped, True) == pool.run(2, wrapped, False)


SYNCS: dict[str, Callable[[], Any]] = {
    "AllReduce": sync.AllReduce,
    "LocalSGD": lambda: sync.LocalSGD(every=3, optimizer_state=sync.Average()),
}


def factors(run: pl.Run) -> list[Tensor] | None:
    assert isinstance(run.order, order.PairBalance | order.GraB)
    found: list[Tensor] | None = run.order.state_dict()["factors"]
    return found


def never_stopped(which: str, how: str) -> tuple[Tensor, list[int], list[list[int]], Any]:
    run, dataset = build(which, sync=SYNCS[how]())
    with run:
        train(run, run.model, epochs=EPOCHS)
        return flat(run.model), dataset.ids[-20:], orders_of(run), factors(run)


def stopped_at(which: str, how: str, steps: int, folder: Path) -> tuple[Tensor, list[int], list[list[int]], Any]:
    run, dataset = resumed_at(steps, folder / "at.ckpt", lambda: build(which, sync=SYNCS[how]()))
    return flat(run.model), dataset.ids[-20:], orders_of(run), factors(run)


@pytest.mark.parametrize("which", list(ORDERS))
@pytest.mark.parametrize(("how", "steps"), [("AllReduce", 3), ("AllReduce", 5), ("AllReduce", 8), ("LocalSGD", 8)])
def test_resume_equals_never_stopped(pool: Pool, tmp_path: Path, which: str, how: str, steps: int) -> None:
    """In an epoch without divisors, at its end, and in one whose divisors the optimizer has left behind."""
    expected = pool.run(2, never_stopped, which, how)
    found = pool.run(2, stopped_at, which, how, steps, tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(expected[0][3], expected[1][3], strict=True))
    for (each, ids, orders, ours), (other, other_ids, other_orders, theirs) in zip(found, expected, strict=True):
        assert torch.equal(each, other)
        assert (ids, orders) == (other_ids, other_orders)
        assert all(torch.equal(one, another) for one, another in zip(ours, theirs, strict=True))


def of_an_epoch() -> list[list[Tensor] | None]:
    """What gradients are divided by, step by step."""
    run, _ = build("pairs")
    found: list[list[Tensor] | None] = []
    with run:
        for step in run.steps(epochs=3):
            found.append(factors(run))
            run.optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(run.model(x), y))
            run.optimizer.step()
    return found


def test_divisors_are_those_of_the_beginning_of_an_epoch() -> None:
    first, second, third = (of_an_epoch()[at : at + STEPS] for at in range(0, 3 * STEPS, STEPS))
    assert first == [None] * STEPS
    for epoch in (second, third):
        assert epoch[0] is not None
        for step in epoch:
            assert step is not None
            assert all(torch.equal(one, other) for one, other in zip(step, epoch[0], strict=True))
    assert second[0] is not None
    assert third[0] is not None
    assert not any(torch.equal(one, other) for one, other in zip(second[0], third[0], strict=True))


def test_an_optimizer_that_has_stepped_before_divides_from_the_first_epoch_on() -> None:
    model = mlp()
    optimizer = optim.Adam(model.parameters())
    found = []
    for _ in range(2):
        role = order.PairBalance(preconditioned=True)
        with pl.Run(model, optimizer, data(48), batch=16, micro=4, order=role) as run:
            found.append(factors(run))
            train(run, model, epochs=1)
    assert found[0] is None
    assert found[1] is not None


def test_a_layer_that_is_thawed_counts_from_the_next_epoch_on() -> None:
    run, _ = build("pairs")
    frozen, *others = run.model.parameters()
    frozen.requires_grad_(False)
    with run:
        known = []
        for epoch in range(4):
            frozen.requires_grad_(epoch > 1)
            train(run, run.model, epochs=epoch + 1)
            found = factors(run)
            assert found is not None
            known.append([each is not None for each in found])
        assert sorted(run.order.permutation(LENGTH, 4, 0).tolist()) == list(range(LENGTH))
    assert known == [[thawed, *[True] * len(others)] for thawed in (False, False, True, True)]


def with_losses_of(scale: float, which: str) -> list[list[list[int]]]:
    model, found = mlp(dtype=torch.float64), []
    optimizer = optim.Adam(model.parameters(), lr=0.02, eps=1e-30)
    role = ORDERS[which](preconditioned=True)
    with pl.Run(model, optimizer, Seen(LENGTH), batch=BATCH, micro=UNIT, order=role, collate_fn=collate) as run:
        for epoch in range(EPOCHS):
            train(run, model, loss=lambda x, y: F.cross_entropy(x, y) * scale, epochs=epoch + 1)
            found.append(orders_of(run))
    return found


@pytest.mark.parametrize("which", list(ORDERS))
def test_the_scale_of_the_loss_does_not_matter_as_it_does_not_to_adam(which: str) -> None:
    """The first epoch's gradients are not divided: what is known of them, a mean or a largest norm, is forgotten."""
    assert with_losses_of(1.0, which) == with_losses_of(2.0**20, which)


def uneven_bounds(preconditioned: bool) -> tuple[float, float]:
    """The herding bound of divided gradients in the order that was learnt, and the least of twenty random ones.

    The model never changes, and half of its gradient is a hundred times as large as the other.
    """
    torch.manual_seed(0)
    x = torch.randn(400, 8, dtype=torch.float64)
    y = (x[:, 0] + torch.randn(400) > 0).long()
    x[:, :4] *= 100
    model = nn.Linear(8, 2).double()
    optimizer = optim.Adam(model.parameters(), lr=0.0)
    role = order.PairBalance(preconditioned=preconditioned)
    with pl.Run(model, optimizer, TensorDataset(x, y), batch=32, micro=1, order=role) as run:
        train(run, model, epochs=8)
        learnt = run.order.permutation(400, 8, 0)
    rows = []
    for at in range(400):
        optimizer.zero_grad()
        F.cross_entropy(model(x[at : at + 1]), y[at : at + 1]).backward()  # type: ignore[no-untyped-call]
        rows.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
    divisor = divisors("Adam", optimizer)
    assert divisor is not None
    divided = torch.stack(rows) / divisor
    generator = torch.Generator().manual_seed(1)
    chance = min(herding_bound(divided[torch.randperm(400, generator=generator)]) for _ in range(20))
    return herding_bound(divided[learnt]), chance


def test_it_is_divided_gradients_that_cancel() -> None:
    (ours, chance), (plain, _) = uneven_bounds(True), uneven_bounds(False)
    assert ours < chance / 2
    assert plain > chance


def of_examples(unit: Any, micro: int) -> list[int]:
    model = mlp(dtype=torch.float64)
    probe = pl.Probe(unit=unit) if unit else pl.Probe()
    role = order.PairBalance(preconditioned=True)
    settings: dict[str, Any] = {"batch": 12, "micro": micro, "probe": probe, "order": role}
    with pl.Run(model, OPTIMIZERS["Adam"](model), Seen(50), **settings) as run:
        train(run, model, epochs=4)
        return run.order.permutation(50, 4, 0).tolist()


def test_single_examples_are_divided_like_micro_batches_of_one() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    assert of_examples(Example(loss), 6) == of_examples(None, 1)


def with_scaler(scale: float | None) -> list[list[int]]:
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    run, _ = build("pairs", scaler=scaler)
    with run:
        for step in run.steps(epochs=EPOCHS):
            run.optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(run.model(x), y))
            if scaler is None:
                run.optimizer.step()
            else:
                scaler.step(run.optimizer)
                scaler.update()
        return orders_of(run)


def test_a_loss_scale_is_divided_out() -> None:
    assert with_scaler(None) == with_scaler(2.0**10)


def test_statistics_and_order_go_together() -> None:
    def sizes(preconditioned: bool) -> tuple[list[float], list[list[int]]]:
        role = order.PairBalance(preconditioned=preconditioned)
        run, _ = build("pairs", probe=pl.Probe(always=True), order=role)
        found: list[float] = []

        def note_down(step: pl.Step) -> None:
            assert step.round is not None
            assert step.round.stats is not None
            found.append(step.round.stats.variance)

        with run:
            train(run, run.model, epochs=2, each=note_down)
            return found, orders_of(run)

    (ours, orders), (theirs, other_orders) = sizes(True), sizes(False)
    assert ours == theirs  # the orders of the first two epochs are the same, and so are the gradients
    assert orders != other_orders


def refused(optimizer: Callable[[Any], optim.Optimizer], **more: Any) -> None:
    model = mlp()
    role = order.PairBalance(preconditioned=True)
    pl.Run(model, optimizer(model.parameters()), data(40), batch=8, micro=4, order=role, **more)


class Own(optim.Adam):
    """Who inherits may step otherwise."""


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9), "SGD"),
        (lambda ps: optim.Rprop(ps, lr=0.1), "Rprop"),
        (optim.LBFGS, "LBFGS"),
        (Own, "Own"),
        (lambda ps: pl.optim.AdaGradNorm(ps, lr=0.1), "AdaGradNorm"),
    ],
)
def test_an_optimizer_of_which_nobody_knows_what_it_divides_by_is_refused(optimizer: Any, name: str) -> None:
    words = f"PairBalance.*preconditioned=True.* but {name} divides by nothing.*use Adam, .*leave preconditioned=True"
    with pytest.raises(SettingError, match=words):
        refused(optimizer)


@pytest.mark.parametrize("state", [sync.Keep(), sync.Reset()])
def test_divisors_that_are_not_the_same_on_all_workers_are_refused(state: Any) -> None:
    words = r"LocalSGD: order=PairBalance.* with optimizer_state=.*; use optimizer_state=sync.Average\(\)"
    with pytest.raises(SettingError, match=words):
        refused(optim.Adam, sync=sync.LocalSGD(4, optimizer_state=state))
