"""A run with every default is hand-written DistributedDataParallel."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from tests.pool import Pool
from tests.problems import data, flat, mlp, train

STEPS = 100
BATCH = 24
LENGTH = 240


def optimizer_for(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)


def by_hand() -> Tensor:
    """Torch's own loop: each worker takes its part of the next examples of the epoch's permutation."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = data(LENGTH).tensors
    model = mlp()
    ddp = DistributedDataParallel(model)
    optimizer = optimizer_for(model)
    share = BATCH // size
    per_epoch = LENGTH // BATCH
    for step in range(STEPS):
        epoch, at = divmod(step, per_epoch)
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(epoch))
        ids = order[at * BATCH + rank * share : at * BATCH + (rank + 1) * share]
        optimizer.zero_grad()
        F.cross_entropy(ddp(x[ids]), y[ids]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return flat(model)


def by_run(wrap: bool) -> Tensor:
    model = mlp()
    wrapped: torch.nn.Module = model
    if wrap:
        dist.init_process_group("gloo")
        wrapped = DistributedDataParallel(model)
    with pl.Run(wrapped, optimizer_for(model), data(LENGTH), batch=BATCH) as run:
        train(run, wrapped, steps=STEPS)
    return flat(model)


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "ddp"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_run_equals_ddp(pool: Pool, workers: int, wrap: bool) -> None:
    expected = pool.run(workers, by_hand)
    found = pool.run(workers, by_run, wrap)
    for each in [*found, *expected]:
        assert torch.equal(each, found[0]) or torch.equal(each, expected[0])
    if workers <= 2 or wrap:
        assert torch.equal(found[0], expected[0])
    else:
        # With four workers gloo adds the parts of a vector in an order that depends on their place in it, and DDP's
        # buckets hold the parameters in another order than the flat buffer. Rounding of 100 steps: about 1e-7.
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-6)


def test_the_comparison_can_fail(pool: Pool) -> None:
    short = pool.run(2, _one_step_less)
    assert not torch.allclose(short[0], pool.run(2, by_hand)[0], rtol=0, atol=1e-6)


def _one_step_less() -> Tensor:
    model = mlp()
    with pl.Run(model, optimizer_for(model), data(LENGTH), batch=BATCH) as run:
        train(run, model, steps=STEPS - 1)
    return flat(model)
