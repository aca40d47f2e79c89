"""Any split into shares and micro-batches, ragged steps included, is one process on the union."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from tests.pool import Pool
from tests.problems import data, flat, mlp, train

LENGTH = 61  # prime: no batch divides it, so every epoch ends with a ragged step


@dataclass(frozen=True)
class Changing:
    """Shares that differ between workers and from step to step."""

    shift: int

    def split(self, batch: int, workers: int) -> Sequence[int]:
        cuts = sorted((batch * (at * 7 + self.shift) // 13) % (batch + 1) for at in range(1, workers))
        return [b - a for a, b in zip([0, *cuts], [*cuts, batch], strict=True)]


def reference(batch: pl.batch.Schedule, epochs: int) -> Tensor:
    """One process, whole batches, no library: double precision, so that sums in another order agree to 1e-12."""
    x, y = data(LENGTH).tensors
    x = x.double()
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    seen = 0
    for epoch in range(epochs):
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(epoch))
        at = 0
        while at < LENGTH:
            size = batch.size(pl.Progress(examples=seen))
            ids = order[at : at + size]
            optimizer.zero_grad()
            F.cross_entropy(model(x[ids]), y[ids]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            at += len(ids)
            seen += len(ids)
    return flat(model)


def trained(batch: pl.batch.Schedule, micro: int | None, shift: int | None, wrap: bool, epochs: int) -> Tensor:
    x, y = data(LENGTH).tensors
    model = mlp(dtype=torch.float64)
    wrapped: nn.Module = model
    if wrap:
        dist.init_process_group("gloo")
        wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    balance: Any = pl.balance.Even() if shift is None else Changing(shift)
    dataset = torch.utils.data.TensorDataset(x.double(), y)
    with pl.Run(wrapped, optimizer, dataset, batch=batch, micro=micro, balance=balance) as run:
        train(run, wrapped, epochs=epochs)
    return flat(model)


CASES = [
    # workers, batch, micro, shift of the shares (None: even), wrapped in DDP
    (1, {0: 16}, 5, None, False),
    (2, {0: 16}, None, 1, False),
    (3, {0: 16}, 4, 5, False),
    (4, {0: 12, 30: 25, 100: 7}, 3, 2, False),
    (4, {0: 59}, 6, None, False),  # the last step has two examples for four workers
    (2, {0: 16}, 3, 1, True),
    (3, {0: 16, 50: 22}, 4, 5, True),
    (4, {0: 59}, 6, None, True),
]


@pytest.mark.parametrize(("workers", "stages", "micro", "shift", "wrap"), CASES)
def test_any_split_equals_one_process(
    pool: Pool, workers: int, stages: dict[int, int], micro: int | None, shift: int | None, wrap: bool
) -> None:
    batch = pl.batch.Schedule(stages)
    found = pool.run(workers, trained, batch, micro, shift, wrap, 3)
    for each in found:
        assert torch.equal(each, found[0])
    # 3 epochs of float64: sums in another order differ by some 1e-16 per step.
    torch.testing.assert_close(found[0], reference(batch, 3), rtol=0, atol=1e-12)


def weighted(micro: int, wrap: bool) -> Tensor:
    """A loss that is a mean over tokens: examples have different numbers of them."""
    x, y = data(LENGTH).tensors
    tokens = torch.arange(LENGTH) % 5 + 1
    model = mlp(dtype=torch.float64)
    wrapped: nn.Module = model
    if wrap:
        dist.init_process_group("gloo")
        wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    dataset = torch.utils.data.TensorDataset(x.double(), y, tokens)
    with pl.Run(wrapped, optimizer, dataset, batch=20, micro=micro, balance=Changing(3)) as run:
        for step in run.steps(epochs=2):
            optimizer.zero_grad()
            for a, b, n in step:
                total = n.sum()
                loss = (F.cross_entropy(wrapped(a), b, reduction="none") * n).sum() / total
                step.backward(loss, weight=float(total))
            optimizer.step()
    return flat(model)


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "ddp"])
def test_token_weights_are_exact(pool: Pool, wrap: bool) -> None:
    alone = pool.run(1, weighted, 1000, False)[0]
    for each in pool.run(3, weighted, 4, wrap):
        torch.testing.assert_close(each, alone, rtol=0, atol=1e-12)


class Branches(nn.Module):
    """Which branch an example takes depends on the example: some parameters get no gradient on some workers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))
        self.never = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = torch.zeros(len(x), 3, dtype=x.dtype)
        for at in sorted(set(y.tolist())):
            out = torch.where((y == at)[:, None], self.branches[at](x), out)
        return out


def branched() -> tuple[Tensor, bool]:
    x, y = data(LENGTH).tensors
    model = Branches().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)
    with pl.Run(model, optimizer, torch.utils.data.TensorDataset(x.double(), y), batch=5) as run:
        for step in run.steps(epochs=2):
            optimizer.zero_grad()
            for a, b in step:
                step.backward(F.cross_entropy(model(a, b), b))
            optimizer.step()
    return flat(model), model.never.weight.grad is None


def test_missing_gradients_neither_hang_nor_corrupt(pool: Pool) -> None:
    """Weight decay makes the difference visible between no gradient (no step) and a gradient of zero."""
    ((alone, never),) = pool.run(1, branched)
    assert never
    for each, none_anywhere in pool.run(3, branched):
        torch.testing.assert_close(each, alone, rtol=0, atol=1e-12)
        assert none_anywhere
