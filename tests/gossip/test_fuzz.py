"""A training that is disturbed by all means is, to the bit, the one that is not."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from torch import Tensor

import paceline as pl
from paceline import sync
from paceline.codec import Identity
from paceline.events import Event, Remark
from paceline.gossip.counts import Counts
from paceline.gossip.wire import Card
from tests.gossip.attack import SENDER, Sent, attack
from tests.pool import Pool
from tests.problems import data, flat, mlp, train

GROWTH = 64 << 20  # bytes that a worker may have taken meanwhile
SETTLE = 30.0  # seconds to read what was sent last


class Remarks:
    """A recorder that keeps what was noticed."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def record(self, event: Event) -> None:
        if isinstance(event, Remark):
            self.said.append(event.text)

    def close(self) -> None:
        pass


class Disturbed(msgspec.Struct):
    models: list[Tensor]
    counts: Counts
    said: list[str]
    grown: int
    heard_of: list[int]


def lockstep(folder: Path | None) -> sync.Gossip:
    invitation = None if folder is None else folder / "invitation"
    return sync.Gossip(1, codec=Identity(), blocking=True, invitation=invitation)


def disturbed(folder: Path) -> Disturbed:
    """Train until all that was sent has been read; then rank 0 stops both."""
    model, rank = mlp(), int(os.environ["RANK"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    role, models, began, done, kept = lockstep(folder), list[Tensor](), 0, 0.0, Remarks()
    with pl.Run(model, optimizer, data(80), batch=8, sync=role, deadline=60.0, record=[kept]) as run:
        node = role.swarm._node
        if rank == 0:
            (folder / "part").write_bytes(msgspec.json.encode(node._card))
            (folder / "part").rename(folder / "card")

        def each(step: pl.Step) -> None:
            nonlocal began, done
            models.append(flat(model))
            time.sleep(0.005)
            began = began or psutil.Process().memory_info().rss
            if node.clerk.members.life(SENDER + rank) == 1:  # the attacker's last letter
                (folder / f"settled-{rank}").touch()
            if not done and (folder / "done").exists():
                done = time.monotonic()
            settled = all((folder / f"settled-{each}").exists() for each in range(2))
            if rank == 0 and done and len(models) > 30 and (settled or time.monotonic() > done + SETTLE):
                run.stop()

        train(run, model, each=each, steps=10**9)
        members, grown = node.clerk.members, psutil.Process().memory_info().rss - began
        heard_of = [number for number in range(2, 100) if members.life(number) >= 0]
        return Disturbed(models, node.clerk.counts, kept.said, grown, heard_of)


def undisturbed(steps: int) -> list[Tensor]:
    model, models = mlp(), list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.Run(model, optimizer, data(80), batch=8, sync=lockstep(None), deadline=60.0) as run:
        train(run, model, each=lambda step: models.append(flat(model)), steps=steps)
    return models


def disturb(folder: Path, count: int, seed: int) -> list[Sent]:
    end = time.monotonic() + 60.0
    while not (folder / "card").exists():
        assert time.monotonic() < end, "the training does not begin"
        time.sleep(0.01)
    try:
        card = msgspec.json.decode((folder / "card").read_bytes(), type=Card)
        return attack(folder / "invitation", card, count, seed)
    finally:
        (folder / "done").touch()


def check(pool: Pool, folder: Path, count: int, seed: int) -> None:
    """``count`` frames to each of two workers."""
    with ThreadPoolExecutor(1) as aside:
        attacker = aside.submit(disturb, folder, count, seed)
        found: list[Disturbed] = pool.run(2, disturbed, folder)
        sent = attacker.result()
    steps = min(len(each.models) for each in found)
    assert steps >= 30
    for ours, theirs in zip(found, pool.run(2, undisturbed, steps), strict=True):
        assert torch.equal(torch.stack(ours.models[:steps]), torch.stack(theirs[:steps]))
        assert ours.grown < GROWTH
        assert set(ours.heard_of) <= {SENDER, SENDER + 1}
    for each, (worker, told) in enumerate(zip(found, sent, strict=True)):
        assert told.refused + told.nonsense + told.strangers + told.oversized == count
        assert worker.counts.unheard == told.refused, each  # every one was noticed, and nothing else
        assert worker.counts.strangers > 0
    assert [text for text in found[0].said if "not of this run" in text]  # in the record, which rank 0 writes
    assert len(found[0].said) == 1


def test_frames_that_are_no_letters_have_no_effect(pool: Pool, tmp_path: Path) -> None:
    check(pool, tmp_path, 1000, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_hundred_thousand_frames_have_no_effect(pool: Pool, tmp_path: Path, seed: int) -> None:
    """In five trainings, to two workers each."""
    check(pool, tmp_path, 10_000, seed)
