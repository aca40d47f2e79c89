"""What the workers of a swarm record, each by itself."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

import paceline as pl
from paceline import record, sync
from paceline.events import Ended, Gossiped, Started, StepDone
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
    for worker in range(3):
        folder = tmp_path / f"worker-{worker}"
        events = list(record.read(folder / "events.jsonl"))
        assert isinstance(events[0], Started)
        assert isinstance(events[-1], Ended)
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
        assert found.wider >= 1  # two that meet for the first time know nothing of their distance
        assert (found.strangers, found.unheard) == (0, 0)
        assert list((folder / "tensorboard").iterdir())
    assert not (tmp_path / "events.jsonl").exists()


def test_one_console_is_enough(tmp_path: Path) -> None:
    kinds = []
    for rank in range(2):
        journal = Journal(tmp_path, rank, each=True)
        kinds.append([type(recorder) for recorder in journal._recorders])
        journal.close()
    assert kinds[0] == [*kinds[1], record.Console]
    assert Journal(tmp_path / "else", rank=1)._recorders == []
    assert not (tmp_path / "else").exists()
