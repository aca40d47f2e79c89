"""What Gossip is equal to, where everything is steered."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import paceline as pl
from paceline import sync
from paceline.codec import Identity
from tests.pool import Pool
from tests.problems import data, flat, mlp, train


def trained(role: Any, momentum: float, steps: int) -> tuple[list[Tensor], str, pl.Progress]:
    """The model after every step, the digest at the end, and how far the run came."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    models: list[Tensor] = []
    with pl.Run(model, optimizer, data(80), batch=8, sync=role) as run:
        train(run, model, each=lambda step: models.append(flat(model)), steps=steps)
        return models, run.replica.digest(), run.progress


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_two_workers_blocking_are_averages_of_parameters(pool: Pool, momentum: float) -> None:
    """The same examples on the same workers; the optimizer's state is local in both."""
    gossip = pool.run(2, trained, sync.Gossip(1, codec=Identity(), blocking=True), momentum, 25)
    local = pool.run(2, trained, sync.LocalSGD(1), momentum, 25)
    for (ours, _, progress), (theirs, _, _) in zip(gossip, local, strict=True):
        assert progress == pl.Progress(step=25, epoch=2, examples=200)
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=0, atol=2e-6)
    assert gossip[0][1] == gossip[1][1]


def momenta(role: Any, kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """The models after every step, and all that the optimizer remembers, but for its counters."""
    model = mlp()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if kind == "SGD":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    models: list[Tensor] = []
    states: list[Tensor] = []
    with pl.Run(model, optimizer, data(80), batch=8, sync=role) as run:

        def each(step: pl.Step) -> None:
            models.append(flat(model))
            kept = [
                value for state in optimizer.state.values() for key, value in sorted(state.items()) if key != "step"
            ]
            states.append(torch.cat([value.reshape(-1) for value in kept]))

        train(run, model, each=each, steps=25)
    return models, states


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_momentum_is_averaged_as_under_local_sgd(pool: Pool, kind: str) -> None:
    average = sync.Average()
    gossip = pool.run(2, momenta, sync.Gossip(1, codec=Identity(), blocking=True, optimizer_state=average), kind)
    local = pool.run(2, momenta, sync.LocalSGD(1, optimizer_state=average), kind)
    for (ours, mine), (theirs, others) in zip(gossip, local, strict=True):
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.stack(mine), torch.stack(others), rtol=0, atol=1e-5)
    torch.testing.assert_close(gossip[0][1][-1], gossip[1][1][-1], rtol=0, atol=1e-6)  # both have gone half of the way


def alone(rank: int, steps: int) -> Tensor:
    """What one worker makes of its share of the same order, without any other."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = [pl.order.Shuffle().permutation(80, epoch, 0) for epoch in range(2)]
    order = torch.cat(ids)
    x, y = data(80).tensors
    for step in range(steps):
        mine = order[8 * step + 4 * rank : 8 * step + 4 * rank + 4]
        optimizer.zero_grad()
        F.cross_entropy(model(x[mine]), y[mine]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return flat(model)


def test_between_exchanges_every_worker_trains_alone(pool: Pool) -> None:
    """No partner is looked for within these steps, and at the end there is one average, of equal weights."""
    found = pool.run(2, trained, sync.Gossip(100), 0.0, 12)
    steps = [len(models) for models, _, _ in found]
    assert max(steps) == 12  # who comes to the end first ends it for all
    own = [alone(rank, count) for rank, count in enumerate(steps)]
    for rank, (models, _, _) in enumerate(found):
        torch.testing.assert_close(models[-1], own[rank], rtol=0, atol=1e-6)


def ended(role: Any) -> tuple[Tensor, int, str]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.Run(model, optimizer, data(80), batch=8, sync=role) as run:
        used = 0
        for step in run.steps(steps=12):
            optimizer.zero_grad()
            for x, y in step:
                used += len(x)
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            time.sleep(0.02 + 0.1 * run.fleet.rank)  # rank 1 does less, and is told to end
        return flat(model), used, run.replica.digest()


def test_the_end_is_an_average_by_the_examples_used(pool: Pool) -> None:
    (first, one, digest), (second, other, same) = pool.run(2, ended, sync.Gossip(100))
    assert digest == same
    assert one > other
    expected = (one * alone(0, one // 4) + other * alone(1, other // 4)) / (one + other)
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(second, first, rtol=0, atol=0)
