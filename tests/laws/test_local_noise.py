"""Workers with data of their own: their gradients differ in every step, and only what differs within one is noise."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline as pl
from paceline import batch, sync
from paceline.probe import Example
from tests.pool import Pool
from tests.problems import data, mlp

BATCH, MICRO = 48, 8
WARNED = "counts as noise of the gradient"


class Seen(NamedTuple):
    """What a worker saw: the gradient of each of its units, and what the run made of all of them."""

    units: Tensor
    variance: float
    mean_sqnorm: float
    along: float | None
    sizes: list[int]
    warned: bool


def loss_of(model: Any, given: Any) -> Tensor:
    return F.cross_entropy(model(given[0]), given[1])


def trained(kind: str, micro: int | None = MICRO, steps: int = 1, at: int = 0) -> Seen:
    """Every worker has one class of its own; gradients of step ``at`` are compared, and set to zeros, not to None."""
    fleet = pl.Fleet.join()
    x, _ = data(240).tensors
    own = TensorDataset(x.double(), torch.full((240,), fleet.rank))
    bare = mlp(dtype=torch.float64)
    model: nn.Module = DistributedDataParallel(bare) if kind == "ddp" else bare
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    probe = pl.Probe(exact=True, unit=Example(loss_of)) if kind == "examples" else pl.Probe(exact=True)
    policy: Any = batch.AugmentedTest(start=BATCH, limit=8 * BATCH, theta=0.9, nu=0.9)
    if kind == "local":
        policy = batch.NormTest(start=BATCH, limit=8 * BATCH, eta=0.9)
    role = sync.LocalSGD(3) if kind == "local" else sync.AllReduce()
    rows: list[Tensor] = []
    sizes: list[int] = []
    found = None
    with (
        warnings.catch_warnings(record=True, action="always") as said,
        pl.Run(
            model,
            optimizer,
            own,
            batch=policy,
            sync=role,
            micro=micro,
            probe=probe,
            local_data=True,
        ) as run,
    ):
        for step in run.steps(steps=3 * steps if kind == "local" else steps):
            sizes.append(step.plan.batch)
            optimizer.zero_grad(set_to_none=False)
            for x, y in step:
                if step.index == at:
                    for part in range(len(x)) if kind == "examples" else [slice(None)]:
                        one = slice(part, part + 1) if isinstance(part, int) else part
                        gradients = torch.autograd.grad(F.cross_entropy(bare(x[one]), y[one]), list(bare.parameters()))
                        rows.append(torch.cat([each.reshape(-1) for each in gradients]))
                step.backward(loss_of(model, (x, y)))
            optimizer.step()
            if step.round is not None and step.index >= at and found is None:
                found = step.round.stats
    assert found is not None
    warned = any(WARNED in str(one.message) for one in said)
    return Seen(torch.stack(rows), found.variance, found.mean_sqnorm, found.along, sizes, warned)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("kind", ["all-reduce", "ddp", "local", "examples"])
def test_units_are_compared_within_each_worker(pool: Pool, kind: str, at: int) -> None:
    """Also in a later step, where gradients are views of what was exchanged in the one before."""
    found = pool.run(3, trained, kind, MICRO, 1 + at, 3 * at if kind == "local" else at)
    n = 1 if kind == "examples" else MICRO
    own = [seen.units for seen in found]
    mean = torch.cat(own).mean(0)
    variance = sum(n * float(units.var(0).sum()) for units in own) / len(own)
    spread = sum(n * float((units @ mean).var()) for units in own) / len(own)
    among_all = n * float(torch.cat(own).var(0).sum())
    assert among_all > 1.3 * variance  # otherwise this would show nothing
    for seen in found:
        assert seen.variance == pytest.approx(variance, rel=1e-6)
        assert seen.mean_sqnorm == pytest.approx(float(mean @ mean), rel=1e-6)
        assert not seen.warned
        if kind != "local":
            assert seen.along == pytest.approx(spread / float(mean @ mean), rel=1e-6)


def test_a_batch_does_not_follow_what_the_data_differ_in(pool: Pool) -> None:
    """All examples of a worker are of one class, so that its gradients are nearly the same."""
    apart = pool.run(2, trained, "all-reduce", BATCH // 4, 5)[0]
    assert apart.sizes == [BATCH] * 5
    together = pool.run(2, trained, "all-reduce", None, 5)
    assert together[0].sizes[-1] > BATCH
    assert [seen.warned for seen in together] == [True, False]
