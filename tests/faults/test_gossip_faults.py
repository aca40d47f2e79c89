"""Workers die in a run under Gossip: the rest go on, come to the end together, and have the same model."""

from __future__ import annotations

import time

import pytest
import torch

import paceline as pl
from paceline import sync
from paceline.testing import Workers, tell_digest
from tests.problems import data, mlp, train

EXAMPLES = 4000


def gossiping() -> None:
    """Train until all together have used so many examples, slowly enough for others to notice a death."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pl.Run(model, optimizer, data(400), batch=16, sync=sync.Gossip(2), deadline=20.0) as run:
        train(run, model, each=lambda step: time.sleep(0.005), examples=EXAMPLES)
        assert run.progress.examples >= EXAMPLES
        tell_digest(model)


@pytest.mark.parametrize("dead", [(0,), (1, 2)], ids=["the first worker", "two of four"])
def test_the_rest_go_on_to_the_end(workers: Workers, dead: tuple[int, ...]) -> None:
    """Also without the worker that torch's store lives in."""
    group = workers(gossiping, size=3 if len(dead) == 1 else 4)
    for rank in dead:
        group.at(step=20 + rank, worker=rank).kill()
    outcome = group.wait(90)
    outcome.check_survivors([ending.worker for ending in outcome.others])
    outcome.check_same_digest()


def test_one_that_is_frozen_and_comes_back_takes_part_again(workers: Workers) -> None:
    group = workers(gossiping, size=3)
    group.at(step=20, worker=1).freeze(2.0)
    outcome = group.wait(90)
    outcome.check_survivors([0, 1, 2])
    outcome.check_same_digest()
