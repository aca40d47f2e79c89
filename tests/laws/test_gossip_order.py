"""Orders that learn under Gossip: every worker from its own gradients, about its own data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

import paceline as pl
from paceline import order, sync
from paceline.codec import Identity
from paceline.errors import SettingError
from paceline.order.learnt import Learnt
from tests.pool import Pool
from tests.problems import data, mlp

UNIT, SHARE = 2, 4
LENGTHS = (40, 40)
EPOCHS = 4
STEPS = EPOCHS * LENGTHS[0] // SHARE
SAVED_AT = 14  # in the middle of the second epoch


class Own(Dataset[tuple[Tensor, Tensor]]):
    """A worker's part of the data; writes down which examples were asked for."""

    def __init__(self, part: int) -> None:
        x, y = data(sum(LENGTHS)).tensors
        begin = sum(LENGTHS[:part])
        self.x, self.y = x[begin : begin + LENGTHS[part]], y[begin : begin + LENGTHS[part]]
        self.ids: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        self.ids.append(at)
        return self.x[at], self.y[at]


def own_streams(preconditioned: bool = False) -> order.PairBalance:
    return order.PairBalance(streams=order.WorkerStreams(shared_sum=False), preconditioned=preconditioned)


def make(lr: float, dataset: Own, preconditioned: bool, **more: Any) -> pl.Run:
    model = mlp()
    optimizer = (torch.optim.Adam if preconditioned else torch.optim.SGD)(model.parameters(), lr=lr)
    return pl.Run(model, optimizer, dataset, order=own_streams(preconditioned), micro=UNIT, **more)


def swarm(lr: float, preconditioned: bool = False) -> tuple[pl.Run, Own]:
    dataset = Own(int(os.environ["RANK"]))
    role = sync.Gossip(3, codec=Identity(), blocking=True)  # 10 steps an epoch: most rounds end in the middle of one
    settings: dict[str, Any] = {"batch": 2 * SHARE, "sync": role, "local_data": True, "deadline": 30.0}
    return make(lr, dataset, preconditioned, **settings), dataset


def orders_of(run: pl.Run) -> list[int]:
    assert isinstance(run.order, Learnt)
    [units] = run.order.orders
    return units


def orders(run: pl.Run, steps: int = STEPS) -> list[list[int]]:
    """The order that a worker has in each of its steps.

    It leaves the loop by itself after so many: a goal would end all as soon as the first of them has come to it.
    """
    found: list[list[int]] = []
    for step in run.steps(steps=2 * STEPS):
        found.append(orders_of(run))
        run.optimizer.zero_grad()
        for x, y in step:
            step.backward(F.cross_entropy(run.model(x), y))
        run.optimizer.step()
        if len(found) == steps:
            break
    return found


def in_a_swarm(lr: float, preconditioned: bool = False) -> tuple[list[list[int]], list[int]]:
    run, dataset = swarm(lr, preconditioned)
    with run:
        return orders(run), dataset.ids


def by_itself(part: int, preconditioned: bool) -> list[list[int]]:
    with make(0.0, Own(part), preconditioned, batch=SHARE, seed=1_000_003 * part) as run:
        return orders(run)


@pytest.mark.parametrize("preconditioned", [False, True])
def test_each_worker_learns_what_it_would_learn_alone(pool: Pool, preconditioned: bool) -> None:
    """Models that never change have the same gradients in a swarm and alone, so the orders must be the same.

    Also if each divides them by moments of its own.
    """
    found, plain = pool.run(2, in_a_swarm, 0.0, preconditioned), pool.run(2, in_a_swarm, 0.0)
    assert (found == plain) is not preconditioned
    for part, (ours, _) in enumerate(found):
        [alone] = pool.run(1, by_itself, part, preconditioned)
        assert ours == alone
        assert len({tuple(each) for each in ours}) == EPOCHS  # epoch after epoch another one


def test_every_worker_sees_each_of_its_examples_once_an_epoch_and_orders_follow_gradients(pool: Pool) -> None:
    still, moving = pool.run(2, in_a_swarm, 0.0), pool.run(2, in_a_swarm, 0.3)
    for (before, _), (after, ids) in zip(still, moving, strict=True):
        for epoch in range(EPOCHS):
            assert sorted(ids[epoch * LENGTHS[0] : (epoch + 1) * LENGTHS[0]]) == list(range(LENGTHS[0]))
        assert before[:10] == after[:10]
        assert before[-1] != after[-1]


def saved(folder: Path, preconditioned: bool) -> list[list[int]]:
    with swarm(0.0, preconditioned)[0] as run:
        found = orders(run, SAVED_AT)
        run.save(folder / "at.ckpt")
        return found


def resumed(folder: Path, preconditioned: bool) -> list[list[int]]:
    with swarm(0.0, preconditioned)[0] as run:
        assert run.resume(folder / "at.ckpt")
        return orders(run, STEPS - SAVED_AT)


@pytest.mark.parametrize("preconditioned", [False, True])
def test_resume_in_the_middle_of_an_epoch(pool: Pool, tmp_path: Path, preconditioned: bool) -> None:
    whole = pool.run(2, in_a_swarm, 0.0, preconditioned)
    first, second = (pool.run(2, job, tmp_path, preconditioned) for job in (saved, resumed))
    for (expected, _), begun, ended in zip(whole, first, second, strict=True):
        assert begun + ended == expected


@pytest.mark.parametrize(
    ("role", "local_data", "instead"),
    [
        (order.PairBalance(streams=order.WorkerStreams()), True, "shared_sum=False"),
        (order.GraB(), True, "shared_sum=False"),
        (own_streams(), False, "order.Shuffle"),
    ],
)
def test_what_needs_the_gradients_of_all_is_refused(role: Learnt, local_data: bool, instead: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingError, match=instead):
        pl.Run(model, optimizer, Own(0), batch=8, order=role, sync=sync.Gossip(2), local_data=local_data)
