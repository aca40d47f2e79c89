"""Workers die in a run under Gossip: the rest go on, come to the end together, and have the same model."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from torch import Tensor

import paceline as pl
from paceline import sync
from paceline.checkpoint import load_newest, parse
from paceline.gossip.invitation import accept
from paceline.testing import Workers, tell_digest
from tests.pool import forks, free_port
from tests.problems import data, flat, mlp, train

EXAMPLES = 4000


def gossiping() -> None:
    """Train until all together have used so many examples, slowly enough for others to notice a death."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pl.Run(model, optimizer, data(400), batch=16, sync=sync.Gossip(2), deadline=20.0) as run:
        train(run, model, each=lambda step: time.sleep(0.005), examples=EXAMPLES)
        assert run.progress.examples >= EXAMPLES
        tell_digest(model)


@pytest.mark.parametrize(
    "dead", [pytest.param((0,), id="the first worker"), pytest.param((1, 2), id="two of four", marks=pytest.mark.slow)]
)
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


LIMIT = 90.0  # seconds for a worker that comes back


def coming_back(pipe: Connection[Any, Any], rank: int, port: int, invitation: Path, again: bool) -> None:
    """Train until the one that has come back has averaged a few times; tell of it, and at the end the digest.

    Every worker saves itself after every second step. Who comes back goes on with its own optimizer, at its own place.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    role = sync.Gossip(2, invitation=invitation)
    saves = invitation.parent / "saves"
    checkpoint = pl.Checkpoint(saves, every=2, keep=2)
    with pl.Run(model, optimizer, data(400), batch=16, sync=role, deadline=30.0, checkpoint=checkpoint) as run:
        given = flat(model)
        resumed = run.resume(saves, missing_ok=True)
        first = run.cursor.progress.step
        if again:
            assert torch.equal(given, flat(model))  # the donor's, not that of the checkpoint
            saved = parse(load_newest(saves / f"worker-{rank}")[1])
            assert torch.equal(optimizer.state[next(model.parameters())]["momentum_buffer"], momentum_of(saved))

        def each(step: pl.Step) -> None:
            time.sleep(0.01)
            if step.index == first + 10:
                pipe.send(("trains", role.swarm.others_examples, resumed, first))
            if again and step.index > first + 10 and role.swarm._node.clerk.counts.exchanges >= 3:
                run.stop()

        train(run, model, each=each, examples=10**9)
        pipe.send(run.replica.digest())


def momentum_of(saved: dict[str, Any]) -> Tensor:
    first: Tensor = saved["optimizer"]["state"][0]["momentum_buffer"]
    return first


def receive(pipe: Connection[Any, Any]) -> Any:
    assert pipe.poll(LIMIT), "nothing was heard of a worker in time"
    return pipe.recv()


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_one_that_is_killed_and_started_again_comes_back(tmp_path: Path, rank: int) -> None:
    """Also the first, with which torch's store has died."""
    context, port, invitation = forks(), free_port(), tmp_path / "invitation"
    pipes = {n: context.Pipe() for n in (0, 1, 2, 3)}
    began = [context.Process(target=coming_back, args=(pipes[n][1], n, port, invitation, False)) for n in range(3)]
    for process in began:
        process.start()
    again = context.Process(target=coming_back, args=(pipes[3][1], rank, port, invitation, True))
    try:
        for n in range(3):
            assert receive(pipes[n][0]) == ("trains", ANY, False, 0)
        before = accept(invitation)
        assert invitation.stat().st_mode & 0o777 == 0o600
        os.kill(began[rank].pid or 0, signal.SIGKILL)
        began[rank].join(LIMIT)
        again.start()
        _, others, resumed, first = receive(pipes[3][0])
        assert others > 0  # it has heard how far the others are
        assert resumed
        assert first >= 10
        now = accept(invitation)  # with where it listens now, for the next that comes back
        assert before is not None
        assert now is None or set(now.addresses) - set(before.addresses)
        ends = [receive(pipes[n][0]) for n in range(4) if n != rank]
        assert len(set(ends)) == 1
        assert not invitation.exists()
    finally:
        for process in [*began, again]:
            if process.pid is not None:
                process.kill()
                process.join()
