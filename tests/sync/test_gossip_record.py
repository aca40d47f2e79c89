"""What the workers of a swarm record, each by itself."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

import paceline as pl
from paceline import record, sync
from paceline.events import Ended, Gossiped, Started, StepDone
from paceline.gossip import sockets
from paceline.gossip.points import Points
from paceline.journal import Journal
from tests.pool import Pool
from tests.problems import data, mlp, train


def recorded(folder: Path) -> None:
    """Train until every worker has exchanged a few times."""
    model, rank = mlp(), int(os.environ["RANK"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    role = sync.Gossip(2)
    with pl.Run(model, optimizer, data(160), batch=12, sync=role, record=folder, deadline=30.0) as run:

        def each(step: pl.Step) -> None:
            time.sleep(0.01)
            if role.swarm._node.clerk.counts.exchanges >= 4:
                (folder / f"met-{rank}").touch()
            if rank == 0 and all((folder / f"met-{one}").exists() for one in range(3)):
                run.stop()

        train(run, model, each=each, steps=10**9)


def test_every_worker_has_a_record_of_its_own(pool: Pool, tmp_path: Path) -> None:
    pool.run(3, recorded, tmp_path)
    wider = 0
    for worker in range(3):
        folder = tmp_path / f"worker-{worker}"
        events = list(record.read(folder / "events.jsonl"))
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], Ended)
        assert isinstance(events[-2], Gossiped)  # what it took to agree on the final model
        assert events[-2].bytes_sent > 0
        assert all(len(event.counts) == 1 for event in events if isinstance(event, StepDone))
        seen = [event for event in events if isinstance(event, Gossiped)]
        assert {event.worker for event in seen} == {worker}
        assert {event.kernel for event in seen} == {"numba"}
        assert max(event.known for event in seen) == max(event.members for event in seen) == 3
        partners = {event.partner for event in seen if event.exchanges}
        assert partners
        assert partners <= {0, 1, 2} - {worker}
        assert all(event.partner is None for event in seen if not event.exchanges + event.late)
        found = record.summary(events).gossip
        assert found is not None
        assert found.exchanges >= 1
        wider += found.wider
        assert (found.strangers, found.unheard) == (0, 0)
        assert list((folder / "tensorboard").iterdir())
    assert not (tmp_path / "events.jsonl").exists()
    assert wider >= 1  # the first two that meet know nothing of their distance


def slow_to_compile() -> int:
    """Rank 1 needs longer for its codec than others wait for an answer: the strangers that it has counted."""
    usual, model, role = Points.prepare, mlp(), sync.Gossip(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def slowly(points: Points) -> None:
        time.sleep(3.0 * int(os.environ["RANK"]))
        usual(points)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Points, "prepare", slowly)
        patch.setattr(sockets, "HANDSHAKE", 1_000)
        with pl.Run(model, optimizer, data(80), batch=8, sync=role, deadline=30.0) as run:
            train(run, model, steps=4)
            return role.swarm._node.clerk.counts.strangers


def test_who_is_not_ready_yet_takes_nobody_for_a_stranger(pool: Pool) -> None:
    assert pool.run(2, slow_to_compile) == [0, 0]


def test_one_console_is_enough(tmp_path: Path) -> None:
    kinds = []
    for rank in range(2):
        journal = Journal(tmp_path, rank, each=True)
        kinds.append([type(recorder) for recorder in journal._recorders])
        journal.close()
    assert kinds[0] == [*kinds[1], record.Console]
    assert Journal(tmp_path / "else", rank=1)._recorders == []
    assert not (tmp_path / "else").exists()
