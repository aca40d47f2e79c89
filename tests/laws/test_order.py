"""Orders that learn, in real runs: the same for every split, exact on resume, and nothing lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

import paceline as pl
from paceline import order, sync
from paceline.errors import LoopError
from paceline.order import PairBalancer
from paceline.order.learnt import Learnt
from paceline.probe import Example
from tests.pool import Pool, RemoteError
from tests.problems import data, flat, mlp, train

LENGTH = 103  # 25 units of 4 examples and three that are left over
UNIT = 4
EPOCHS = 4

ORDERS: dict[str, Callable[..., Any]] = {
    "pairs": order.PairBalance,
    "mean": order.GraB,
    "streams": lambda **more: order.PairBalance(streams=order.WorkerStreams(), **more),
    "walk": lambda **more: order.PairBalance(rule=order.Walk(limit=1.0), **more),
    "own sums": lambda **more: order.PairBalance(streams=order.WorkerStreams(shared_sum=False), **more),
}


class Seen(Dataset[tuple[Tensor, Tensor]]):
    """Writes down which examples were asked for."""

    def __init__(self, length: int) -> None:
        self.x, self.y = data(length).tensors
        self.ids: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        self.ids.append(at)
        return self.x[at].double(), self.y[at]


def build(kind: str, length: int = LENGTH, **more: Any) -> tuple[pl.Run, Seen]:
    model, dataset = mlp(dtype=torch.float64), Seen(length)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    settings: dict[str, Any] = {"batch": 24, "micro": UNIT, "order": ORDERS[kind](), "collate_fn": collate, **more}
    return pl.Run(model, optimizer, dataset, **settings), dataset


def orders_of(run: pl.Run) -> list[list[int]]:
    assert isinstance(run.order, Learnt)
    return run.order.orders


def collate(examples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [torch.stack(each) for each in zip(*examples, strict=True)]


def trained(kind: str, more: Callable[[], dict[str, Any]] = dict) -> tuple[Tensor, list[list[int]]]:
    """The parameters, and the examples of each epoch that this worker had."""
    run, dataset = build(kind, order=ORDERS[kind](exact=True), probe=pl.Probe(exact=True), **more())
    with run:
        found = seen_in_epochs(run, dataset)
        with run.consensus():
            return flat(run.model), found


def seen_in_epochs(run: pl.Run, dataset: Seen) -> list[list[int]]:
    """Train, and give the examples of each epoch that this worker had."""
    found: list[list[int]] = []
    for epoch in range(EPOCHS):
        dataset.ids.clear()
        train(run, run.model, epochs=epoch + 1)
        found.append(list(dataset.ids))
    return found


def epoch_by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Seen,
    units: list[Tensor],
    observe: Callable[[int, Tensor], None],
) -> None:
    """Six units to a step in a plain loop; who observes gets the number and the gradient of each."""
    for step in range(0, len(units), 6):
        chosen = units[step : step + 6]
        total = torch.zeros_like(flat(model))
        for at, unit in enumerate(chosen):
            optimizer.zero_grad()
            x, y = collate([dataset[one] for one in unit.tolist()])
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
            total += len(unit) * gradient / sum(map(len, chosen))
            observe(step + at, gradient)
        torch.nn.utils.vector_to_parameters(total, [p.grad for p in model.parameters()])  # type: ignore[misc]
        optimizer.step()


def by_hand() -> tuple[Tensor, list[list[int]]]:
    """PairGraB as it is published, in a plain loop: micro-batches are units, and what is left over comes last."""
    model, dataset = mlp(dtype=torch.float64), Seen(LENGTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    drawn = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    units = [drawn[at : at + UNIT] for at in range(0, LENGTH, UNIT)]
    whole = len(units) - 1
    balancer, sequence, found = PairBalancer([list(range(whole))]), list(range(whole)), []
    for _ in range(EPOCHS):
        ordered = [units[at] for at in [*sequence, whole]]
        found.append(torch.cat(ordered).tolist())

        def observe(at: int, gradient: Tensor) -> None:
            if at != whole:
                balancer.observe(gradient[None])

        epoch_by_hand(model, optimizer, dataset, ordered, observe)
        sequence = balancer.next_orders()[0]
    return flat(model), found


def test_one_worker_is_pairgrab_by_hand(pool: Pool) -> None:
    (parameters, seen), (expected, order_by_hand) = pool.run(1, trained, "pairs")[0], pool.run(1, by_hand)[0]
    assert seen == order_by_hand
    assert len({tuple(each) for each in seen}) == EPOCHS
    torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)


def unequal() -> dict[str, Any]:
    """Shares that are no multiples of a unit: units are done in parts by several workers."""
    return {"balance": pl.balance.Fixed([5, 3, 2][: int(os.environ["WORLD_SIZE"])])}


def growing() -> dict[str, Any]:
    return {"batch": pl.batch.Schedule({0: 24, 60: 31, 150: 40})}


@pytest.mark.parametrize("kind", ["pairs", "mean"])
@pytest.mark.parametrize("more", [dict, unequal, growing])
@pytest.mark.parametrize("workers", [2, 3])
def test_any_split_equals_one_process(pool: Pool, kind: str, more: Callable[[], dict[str, Any]], workers: int) -> None:
    ((expected, alone),) = pool.run(1, trained, kind, growing if more is growing else dict)
    found = pool.run(workers, trained, kind, more)
    for epoch in range(EPOCHS):
        assert sorted(one for _, seen in found for one in seen[epoch]) == list(range(LENGTH))
    assert len(alone) == EPOCHS
    for parameters, _ in found:
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-10)


def wrapped(kind: str) -> tuple[Tensor, list[list[int]]]:
    run, _ = build(kind)
    run.close()
    ddp = DistributedDataParallel(run.model)
    found = []
    with pl.Run(
        ddp, run.optimizer, Seen(LENGTH), batch=24, micro=UNIT, order=ORDERS[kind](), collate_fn=collate
    ) as second:
        for epoch in range(EPOCHS):
            train(second, ddp, epochs=epoch + 1)
            found.append(second.order.permutation(LENGTH, epoch + 1, 0).tolist())
        return flat(run.model), found


def bare(kind: str) -> tuple[Tensor, list[list[int]]]:
    run, _ = build(kind)
    found = []
    with run:
        for epoch in range(EPOCHS):
            train(run, run.model, epochs=epoch + 1)
            found.append(run.order.permutation(LENGTH, epoch + 1, 0).tolist())
        return flat(run.model), found


def test_a_ddp_module_teaches_the_same(pool: Pool) -> None:
    for (parameters, orders), (others, other_orders) in zip(
        pool.run(2, wrapped, "pairs"), pool.run(2, bare, "pairs"), strict=True
    ):
        assert orders == other_orders
        torch.testing.assert_close(parameters, others, rtol=0, atol=1e-10)


SYNCS: dict[str, Callable[[], Any]] = {
    "AllReduce": sync.AllReduce,
    "LocalSGD": lambda: sync.LocalSGD(every=3),
    "Seconds": lambda: sync.LocalSGD(every=sync.Seconds(0.02)),
}


def covered(kind: str, how: str) -> tuple[list[list[int]], list[list[int]]]:
    run, dataset = build(kind, sync=SYNCS[how]())
    seen: list[list[int]] = [[], [], []]
    orders: list[list[int]] = [[], [], []]

    def note_down(step: pl.Step) -> None:
        seen[step.epoch] += dataset.ids
        dataset.ids.clear()
        orders[step.epoch] = run.order.permutation(LENGTH, step.epoch, 0).tolist()

    with run:
        train(run, run.model, epochs=3, each=note_down)
    return seen, orders


@pytest.mark.parametrize("kind", list(ORDERS))
@pytest.mark.parametrize("how", list(SYNCS))
def test_every_epoch_has_every_example_once_under_every_sync(pool: Pool, kind: str, how: str) -> None:
    found = pool.run(2, covered, kind, how)
    (_, orders), (_, theirs) = found
    assert orders == theirs
    assert len({tuple(each) for each in orders}) == 3
    for epoch in range(3):
        assert sorted(one for seen, _ in found for one in seen[epoch]) == list(range(LENGTH))


def never_stopped(kind: str, how: str) -> tuple[Tensor, list[int]]:
    run, dataset = build(kind, sync=SYNCS[how]())
    with run:
        train(run, run.model, epochs=EPOCHS)
        return flat(run.model), dataset.ids[-20:]


def resumed_at(steps: int, file: Path, make: Callable[[], tuple[pl.Run, Seen]]) -> tuple[pl.Run, Seen]:
    """A run that was saved after so many steps, and resumed and trained to its end by another."""
    run, _ = make()
    with run:
        train(run, run.model, steps=steps)
        run.save(file)
        train(run, run.model, steps=steps + 4)  # work that is lost
    run, dataset = make()
    with run:
        assert run.resume(file)
        train(run, run.model, epochs=EPOCHS)
    return run, dataset


def stopped_at(kind: str, how: str, steps: int, folder: Path) -> tuple[Tensor, list[int]]:
    run, dataset = resumed_at(steps, folder / "at.ckpt", lambda: build(kind, sync=SYNCS[how]()))
    return flat(run.model), dataset.ids[-20:]


@pytest.mark.parametrize("kind", list(ORDERS))
@pytest.mark.parametrize(("how", "steps"), [("AllReduce", 3), ("AllReduce", 5), ("AllReduce", 12), ("LocalSGD", 10)])
def test_resume_equals_never_stopped(pool: Pool, tmp_path: Path, kind: str, how: str, steps: int) -> None:
    """5 is the last step of an epoch; under LocalSGD 10 ends both an epoch and a round."""
    expected = pool.run(2, never_stopped, kind, how)
    found = pool.run(2, stopped_at, kind, how, steps, tmp_path)
    for (each, ids), (other, other_ids) in zip(found, expected, strict=True):
        assert torch.equal(each, other)
        assert ids == other_ids


def in_the_middle_of_a_round(kind: str, folder: Path, stop: bool) -> tuple[Tensor, list[int]]:
    run, dataset = build(kind, sync=sync.LocalSGD(every=4))
    with run:
        for step in run.steps(epochs=EPOCHS):
            run.optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(run.model(x), y))
            run.optimizer.step()
            if step.index == 6 and stop:
                run.save(folder / "at.ckpt")
        if not stop:
            return flat(run.model), dataset.ids[-20:]
    run, dataset = build(kind, sync=sync.LocalSGD(every=4))
    with run:
        assert run.resume(folder / "at.ckpt")
        train(run, run.model, epochs=EPOCHS)
        return flat(run.model), dataset.ids[-20:]


@pytest.mark.parametrize("kind", ["pairs", "streams"])
def test_resume_in_the_middle_of_a_round(pool: Pool, tmp_path: Path, kind: str) -> None:
    expected = pool.run(2, in_the_middle_of_a_round, kind, tmp_path, False)
    found = pool.run(2, in_the_middle_of_a_round, kind, tmp_path, True)
    for (each, ids), (other, other_ids) in zip(found, expected, strict=True):
        assert torch.equal(each, other)
        assert ids == other_ids


def save_after(kind: str, steps: int, path: Path) -> list[int]:
    run, dataset = build(kind)
    with run:
        train(run, run.model, steps=steps)
        run.save(path)
    return dataset.ids


def go_on(kind: str, path: Path) -> tuple[list[list[int]], int, list[int]]:
    run, dataset = build(kind)
    seen = []
    with run:
        assert run.resume(path)
        for epoch in (1, 2, 3):
            dataset.ids.clear()
            train(run, run.model, epochs=epoch)
            seen.append(list(dataset.ids))
        return seen, len(orders_of(run)), run.order.permutation(LENGTH, 3, 0).tolist()


@pytest.mark.parametrize("kind", ["pairs", "streams"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_another_number_of_workers_goes_on(pool: Pool, tmp_path: Path, kind: str, before: int, after: int) -> None:
    began = pool.run(before, save_after, kind, 3, tmp_path / "at.ckpt")
    found = pool.run(after, go_on, kind, tmp_path / "at.ckpt")
    rest = [one for seen, _, _ in found for one in seen[0]]
    assert sorted([*(one for ids in began for one in ids), *rest]) == list(range(LENGTH))
    for epoch in (1, 2):
        assert sorted(one for seen, _, _ in found for one in seen[epoch]) == list(range(LENGTH))
    assert {streams for _, streams, _ in found} == {after if kind == "streams" else 1}
    assert len({tuple(last) for _, _, last in found}) == 1


def resume_with_another_length(path: Path) -> None:
    run, _ = build("pairs", length=LENGTH + 4)
    with run:
        run.resume(path)


def test_other_data_cannot_be_resumed_with_what_was_learnt(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, save_after, "pairs", 5, tmp_path / "at.ckpt")  # between two epochs, where another order could go on
    with pytest.raises(RemoteError, match="the dataset length of the checkpoint is 103, but the run's is 107"):
        pool.run(1, resume_with_another_length, tmp_path / "at.ckpt")


def own_data(how: str) -> tuple[list[int], list[list[int]], list[list[int]]]:
    rank = int(os.environ["RANK"])
    length = 43 + 10 * rank
    run, dataset = build("streams", length=length, local_data=True, sync=SYNCS[how]())
    orders = []
    with run:
        for epoch in range(3):
            train(run, run.model, epochs=epoch + 1)
            orders.append(orders_of(run))
    return dataset.ids, orders[0], orders[2]


@pytest.mark.parametrize("how", ["AllReduce", "LocalSGD"])
def test_workers_with_data_of_their_own_have_streams_of_their_own(pool: Pool, how: str) -> None:
    found = pool.run(2, own_data, how)
    for rank, (ids, first, last) in enumerate(found):
        assert sorted(ids) == sorted([*range(43 + 10 * rank)] * 3)
        assert (first, last) == found[0][1:]  # all know the orders of all
        assert first != last
        assert [len(each) for each in last] == [10, 13]


def left_early() -> tuple[list[int], list[int]]:
    """Rank 1 leaves in the middle of a round; then both go on together."""
    run, dataset = build("pairs", sync=sync.LocalSGD(every=4))
    with run:
        for step in run.steps(epochs=1):
            run.optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(run.model(x), y))
            run.optimizer.step()
            if step.index == 1 and run.fleet.rank == 1:
                break
        train(run, run.model, epochs=1)
        dataset.ids.clear()
        train(run, run.model, epochs=2)
        return dataset.ids, run.order.permutation(LENGTH, 2, 0).tolist()


def test_a_worker_that_leaves_early_is_no_harm(pool: Pool) -> None:
    (first, order_there), (second, order_here) = pool.run(2, left_early)
    assert sorted(first + second) == list(range(LENGTH))
    assert order_there == order_here


def labels(others: bool) -> list[int]:
    model = mlp()
    x, y = data(96).tensors
    dataset = TensorDataset(x, y.flip(0) if others else y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.Run(model, optimizer, dataset, batch=16, micro=4, order=order.PairBalance()) as run:
        train(run, model, epochs=1)
        return run.order.permutation(96, 1, 0).tolist()


def skips_on_one_worker(kind: str) -> list[list[int]]:
    """One worker's scaler skips the last step of the first epoch, after which all look at the model."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = data(64).tensors
    roles: dict[str, Any] = {"sync": sync.LocalSGD(5), "order": ORDERS[kind](), "scaler": scaler}
    with pl.Run(model, optimizer, TensorDataset(x, y), batch=16, micro=4, deadline=20.0, **roles) as run:
        for step in run.steps(epochs=2):
            optimizer.zero_grad()
            for inputs, classes in step:
                loss = F.cross_entropy(model(inputs), classes)
                overflow = run.fleet.rank == 1 and step.index == 3
                step.backward(loss * torch.inf if overflow else loss)
            scaler.step(optimizer)
            scaler.update()
            if step.ends_epoch:
                with run.consensus():
                    pass
        return orders_of(run)


def test_who_skips_the_last_step_of_an_epoch_does_not_wait_for_the_others(pool: Pool) -> None:
    first, second = pool.run(2, skips_on_one_worker, "pairs")
    assert first == second


@pytest.mark.parametrize("kind", ["pairs", "walk"])
def test_an_order_begins_anew_with_every_run(kind: str) -> None:
    once: Any = ORDERS[kind]()
    found = []
    for _ in range(2):
        run, _ = build(kind, order=once)
        with run:
            train(run, run.model, epochs=3)
            found.append(orders_of(run))
    assert found[0] == found[1]


def test_other_gradients_make_another_order() -> None:
    assert labels(False) == labels(False)
    assert labels(False) != labels(True)


def of_examples(unit: Any, micro: int) -> list[int]:
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = pl.Probe(unit=unit) if unit else pl.Probe()
    settings: dict[str, Any] = {"batch": 12, "micro": micro, "probe": probe, "order": order.PairBalance()}
    with pl.Run(model, optimizer, Seen(50), **settings) as run:
        train(run, model, epochs=3)
        return run.order.permutation(50, 3, 0).tolist()


def test_single_examples_are_units_where_the_probe_sees_them() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    assert of_examples(Example(loss), 6) == of_examples(None, 1)


@pytest.mark.parametrize("how", [sync.AllReduce, lambda: sync.LocalSGD(every=2)])
def test_statistics_and_order_share_the_sketches(how: Callable[[], Any]) -> None:
    """Under LocalSGD statistics are measured in one step of a round, and units in all of them."""
    policy, probe = pl.batch.NormTest(start=24, limit=48, eta=0.5), pl.Probe(always=True)
    run, _ = build("pairs", sync=how(), batch=policy, probe=probe)
    rounds: list[pl.Round | None] = []
    with run:
        train(run, run.model, epochs=2, each=lambda step: rounds.append(step.round))
        after = orders_of(run)
    assert all(each.stats is not None for each in rounds if each is not None)
    assert sum(each is not None for each in rounds) > 3
    run, _ = build("pairs", sync=how())
    with run:
        assert after != orders_of(run)


def refused(kind: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how = sync.Gossip(4) if kind == "gossip" else sync.LocalSGD(4, overlap=1)
    pl.Run(model, optimizer, data(40), batch=8, micro=4, order=order.PairBalance(), sync=how)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("gossip", "under Gossip they never come together"), ("overlap", "leave overlap out, or use order.Shuffle")],
)
def test_what_cannot_be_together(pool: Pool, kind: str, words: str) -> None:
    with pytest.raises(RemoteError, match=words):
        pool.run(2, refused, kind)


def test_micro_batches_of_padding_alone_are_no_harm() -> None:
    run, dataset = build("pairs")
    with run:
        for step in run.steps(epochs=3):
            run.optimizer.zero_grad()
            for at, (x, y) in enumerate(step):
                step.backward(F.cross_entropy(run.model(x), y), weight=float(at % 3) if step.index % 5 < 4 else None)
            run.optimizer.step()
        assert sorted(run.order.permutation(LENGTH, 3, 0).tolist()) == list(range(LENGTH))
    assert sorted(dataset.ids) == sorted([*range(LENGTH)] * 3)


def nothing_but_overflow(run: pl.Run, scaler: torch.amp.GradScaler) -> None:
    for step in run.steps(epochs=1):
        run.optimizer.zero_grad()
        for x, y in step:
            step.backward(F.cross_entropy(run.model(x), y) * float("inf"))
        scaler.step(run.optimizer)
        scaler.update()


def test_an_epoch_without_finite_gradients_teaches_nothing() -> None:
    scaler = torch.amp.GradScaler("cpu")
    run, _ = build("pairs", scaler=scaler)
    with run, pytest.raises(LoopError, match="without any gradient that an order could learn from"):
        nothing_but_overflow(run, scaler)


def growing_data() -> None:
    run, dataset = build("pairs")
    with run:
        train(run, run.model, epochs=1)
        dataset.x, dataset.y = data(LENGTH + 8).tensors
        train(run, run.model, epochs=2)


def test_data_that_grow_between_epochs_are_refused() -> None:
    with pytest.raises(LoopError, match="has 111 examples at the beginning of epoch 1, and had 103"):
        growing_data()
