"""One of two workers that share memory is lost, or gives a swap up: the other says so, and no numbers are mixed."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.nn.functional as F

import paceline as pl
from paceline.roles import Sync
from paceline.testing import Workers
from tests.pool import Pool
from tests.problems import data, mlp

DEADLINE = 3.0
PROMISE = DEADLINE + 10  # seconds, of the documentation
STEP = 5


def role(kind: str) -> Sync:
    return pl.sync.LocalSGD(2) if kind == "rounds" else pl.sync.AllReduce()


def train(kind: str, fault: str) -> None:
    """Rank 0 is late in the step in which rank 1 is lost."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.Run(model, optimizer, data(400), batch=16, deadline=DEADLINE, sync=role(kind)) as run:
        for step in run.steps(epochs=1000):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
                if step.index == STEP and run.fleet.rank == 0:
                    time.sleep(1.5)
                if step.index == STEP and run.fleet.rank == 1 and fault == "raise":
                    raise ValueError("bad example 17")
            optimizer.step()


@pytest.mark.parametrize("fault", ["kill", "raise"])
@pytest.mark.parametrize("kind", ["rounds", "all-reduce"])
def test_who_comes_late_hears_who_is_lost(workers: Workers, kind: str, fault: str) -> None:
    group = workers(train, kind, fault, size=2)
    at = group.at(step=STEP, worker=1)
    at.kill() if fault == "kill" else at.mark()
    outcome = group.wait(DEADLINE + 60)
    why = {"kill": "(ended or lost its connection|gave no sign of life)", "raise": "raised ValueError: bad example 17"}
    outcome.check_detected(within=PROMISE, error="WorkerLost", says=rf"rank 1 {why[fault]}")
    what = {"rounds": "the models after", "all-reduce": "the gradients of"}[kind]
    (survivor,) = outcome.others
    assert re.search(rf"WorkerLost: rank 0, in step 5, waited [\d.]+ s for {what} step 5", survivor.output)


def goes_on_after_an_error() -> list[str]:
    """Rank 1 is late once, so that rank 0 gives up; both then try to go on. What was averaged, step by step."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    try:
        with pl.Run(model, optimizer, data(400, 4), batch=16, deadline=0.5, sync=pl.sync.LocalSGD(1)) as run:
            for step in run.steps(steps=8):
                optimizer.zero_grad()
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y % 2))
                if step.index == 3 and run.fleet.rank == 1:
                    time.sleep(6.0)
                with torch.no_grad():
                    model.weight.fill_(100.0 * step.index + run.fleet.rank)
                try:
                    optimizer.step()
                except pl.WorkerLost:
                    found.append("lost")
                else:
                    found.append(f"{float(model.weight.detach().mean()):.1f}")
    except pl.WorkerLost:
        found.append("lost")
    return found


def test_a_swap_that_was_given_up_is_not_made_up_for_by_the_next(pool: Pool) -> None:
    """Then one worker's numbers of a step would be averaged with the other's of another step."""
    first, second = pool.run(2, goes_on_after_an_error)
    right = [f"{100 * step + 0.5:.1f}" for step in range(8)]
    assert first[:4] == [*right[:3], "lost"]
    assert second[:3] == right[:3]
    for found in (first, second):
        assert all(one in ("lost", there) for one, there in zip(found, right, strict=False))
    assert "lost" in second
