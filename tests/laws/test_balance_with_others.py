"""Shares by speed together with other methods: what counts as a worker's own work there, and what is recorded."""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.balance import BySpeed
from paceline.batch import GrowthSchedule, InnerProductTest, Schedule
from paceline.events import StepDone
from paceline.records import Round
from paceline.sync import LocalSGD, Seconds
from tests.laws.test_balance import Kept, Slow, efficiencies
from tests.pool import Pool
from tests.problems import data, mlp

BATCH, LENGTH = 24, 240
SECONDS = (0.001, 0.004)  # that an example takes on each worker


def trained(
    balance: Any, role: Any = None, batch: Any = BATCH, wrap: str = "", norm: bool = False, epochs: int = 3
) -> tuple[list[tuple[int, ...]], list[Round], list[StepDone], list[str]]:
    """The shares of every step, the rounds, what was recorded, and the warnings."""
    fleet = pl.Fleet.join()
    layers = nn.Sequential(nn.BatchNorm1d(6), mlp()) if norm else mlp()
    if norm:
        layers.eval()  # rounds of seconds may leave a single example, of which training mode has no variance
    model: nn.Module = Slow(layers, SECONDS[fleet.rank])
    if wrap:
        model = DistributedDataParallel(model)
        if wrap == "hooked":
            model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shares, rounds, kept = [], [], Kept()
    with (
        warnings.catch_warnings(record=True) as said,
        pl.Run(model, optimizer, data(LENGTH), batch=batch, balance=balance, sync=role, record=[kept]) as run,
    ):
        warnings.simplefilter("always")
        for step in run.steps(epochs=epochs):
            shares.append(step.plan.counts)
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if step.round is not None:
                rounds.append(step.round)
        assert run.progress.examples == epochs * LENGTH
    return shares, rounds, kept.steps, [str(one.message) for one in said]


@pytest.mark.parametrize("overlap", [0, 1, 3, 6])
def test_seconds_are_those_of_the_steps_that_are_counted(pool: Pool, overlap: int) -> None:
    """Sleeping takes no less than it is asked to, so seconds of fewer steps would be seen."""
    shares, rounds, _, _ = pool.run(2, trained, BySpeed(every=6), LocalSGD(6, overlap=overlap))[0]
    assert len(rounds) >= 4
    for each in rounds:
        for note, seconds in zip(each.notes, SECONDS, strict=True):
            assert note.busy_seconds >= 0.99 * seconds * note.examples
    assert shares[-1][0] > shares[-1][1]


def test_rounds_of_seconds(pool: Pool) -> None:
    found = pool.run(2, trained, BySpeed(every=4), LocalSGD(Seconds(0.1)))
    shares = [counts for counts in found[0][0] if sum(counts) == BATCH]
    assert shares[-1][0] > shares[-1][1]


def test_a_module_in_ddp(pool: Pool) -> None:
    found = pool.run(2, trained, BySpeed(every=4), None, BATCH, "plain")
    assert found[0][0] == found[1][0]
    fast, slow = found[0][0][-1]
    assert fast > 2 * slow  # 4 times, were there nothing but the sleep


def test_ddp_with_a_hook_of_the_user(pool: Pool) -> None:
    """Its wait for the others would be taken for work, and all workers for equally fast."""
    with pytest.raises(Exception, match="cannot tell work from waiting"):
        pool.run(2, trained, BySpeed(every=4), None, BATCH, "hooked")
    shares = pool.run(2, trained, pl.balance.Even(), None, BATCH, "hooked")[0][0]
    assert set(shares) == {(12, 12)}


def test_shares_follow_a_batch_that_grows(pool: Pool) -> None:
    growing = GrowthSchedule(start=12, limit=96, factor=2.0, every=LENGTH)
    shares = pool.run(2, trained, BySpeed(every=4), None, growing, "", False, 4)[0][0]
    first = {size: next(counts for counts in shares if sum(counts) == size) for size in (12, 24, 48, 96)}
    assert first[12] == (6, 6)
    assert all(fast > 2 * slow for size, (fast, slow) in first.items() if size > 12)


@pytest.mark.parametrize(
    "growing", [GrowthSchedule(start=12, limit=96, factor=2.0, every=LENGTH), Schedule({0: 12, LENGTH: 96})]
)
def test_a_batch_that_would_outgrow_the_caps_is_refused_at_the_start(pool: Pool, growing: Any) -> None:
    with pytest.raises(Exception, match="96 examples are more than all workers can take together"):
        pool.run(2, trained, BySpeed(most=40), None, growing)


def test_efficiency_of_even_shares(pool: Pool) -> None:
    """12 examples in 12 and 48 ms: 500 examples a second of 1250, and what is not sleep is equal on both."""
    _, _, steps, _ = pool.run(2, trained, pl.balance.Even())[0]
    assert 0.3 < statistics.median(efficiencies(steps)) < 0.7


def test_a_step_with_two_exchanges_has_one_wait(pool: Pool) -> None:
    policy = InnerProductTest(start=BATCH, limit=BATCH, theta=0.9)
    _, _, steps, _ = pool.run(2, trained, pl.balance.Even(), None, policy)[0]
    assert statistics.median(step.wait_seconds[0] for step in steps) > 0.02  # 36 ms, were there nothing else
    assert statistics.median(step.wait_seconds[1] for step in steps) < 0.01
    assert efficiencies(steps)


def test_batch_norm_in_rounds_of_seconds_is_warned_of(pool: Pool) -> None:
    said = pool.run(2, trained, pl.balance.Fixed([2, 1]), LocalSGD(Seconds(0.1)), BATCH, "", True, 1)[0][3]
    [told] = [text for text in said if "BatchNorm" in text]
    assert "[16, 8]" in told
