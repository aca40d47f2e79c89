"""Resume at any step equals never having stopped, bit for bit."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline as pl
from paceline.testing import Workers
from tests.pool import Pool
from tests.problems import data, flat

LENGTH = 90  # no micro-batch of one example, which BatchNorm refuses
EPOCHS = 3


class Model(nn.Module):
    """Everything that has a state: dropout draws random numbers, BatchNorm has buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def state(model: nn.Module) -> Tensor:
    buffers = [b.double().reshape(-1) for b in model.buffers()]
    return torch.cat([flat(model).double(), *buffers])


def build(checkpoint: pl.Checkpoint | None) -> tuple[pl.Run, Any]:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    rank = int(os.environ["RANK"])
    torch.manual_seed(100 + rank)  # other dropout masks on every worker
    random.seed(100 + rank)
    np.random.seed(100 + rank)
    run = pl.Run(
        model,
        optimizer,
        data(LENGTH),
        batch=pl.batch.Schedule({0: 12, 100: 20}),
        micro=5,
        stateful={"scheduler": scheduler},
        checkpoint=checkpoint,
    )
    return run, scheduler


def loop(run: pl.Run, scheduler: Any, seconds: float = 0.0, **goal: int) -> None:
    for step in run.steps(**goal):
        run.optimizer.zero_grad()
        for x, y in step:
            noise = random.random() + float(np.random.rand())  # python's and numpy's generators decide, too
            step.backward(F.cross_entropy(run.model(x), y) * (1 + 0.1 * noise))
        run.optimizer.step()
        scheduler.step()
        time.sleep(seconds)


def never_stopped() -> Tensor:
    run, scheduler = build(None)
    with run:
        loop(run, scheduler, epochs=EPOCHS)
        with run.consensus():
            return state(run.model)


def stopped_at(steps: int, folder: Path) -> Tensor:
    run, scheduler = build(None)
    with run:
        loop(run, scheduler, steps=steps)
        run.save(folder / "at.ckpt")
        loop(run, scheduler, steps=steps + 2)  # work that is lost
    run, scheduler = build(None)
    with run:
        torch.rand(3)
        assert run.resume(folder / "at.ckpt")
        assert run.progress.step == steps
        loop(run, scheduler, epochs=EPOCHS)
        with run.consensus():
            return state(run.model)


@pytest.mark.parametrize(("workers", "steps"), [(1, 5), (2, 1), (2, 7), (3, 9)])
def test_resume_equals_never_stopped(pool: Pool, tmp_path: Path, workers: int, steps: int) -> None:
    """7 is the last step of an epoch with these batches; 9 lies in the middle of another."""
    expected = pool.run(workers, never_stopped)
    found = pool.run(workers, stopped_at, steps, tmp_path)
    for each, other in zip(found, expected, strict=True):
        assert torch.equal(each, other)


def keep_going(folder: Path, seconds: float) -> None:
    """What a script does: resume if there is something, train, and leave the result."""
    run, scheduler = build(pl.Checkpoint(folder / "saves", every=1, keep=2))
    with run:
        run.resume(folder / "saves", missing_ok=True)
        loop(run, scheduler, seconds, epochs=EPOCHS)
        with run.consensus():
            torch.save(state(run.model), folder / f"result-{run.fleet.rank}.pt")


def kill_at_random_and_resume(pool: Pool, workers: Workers, folder: Path, size: int, kills: int, seed: int) -> None:
    expected = pool.run(size, never_stopped)
    moments = random.Random(seed)
    for _ in range(kills):
        saved = [int(path.stem.removeprefix("step-")) for path in (folder / "saves").glob("step-*.ckpt")]
        group = workers(keep_going, folder, 0.01, size=size)
        # A step with its save takes about 20 ms: any moment of one of the steps that follow.
        step, delay = max(saved, default=0) + moments.randrange(1, 3), moments.random() * 0.05
        group.at(step=step, worker=moments.randrange(size), delay=delay).kill()
        group.wait(90, besides=range(size))
    workers(keep_going, folder, 0.01, size=size).wait(90).check_survivors(range(size))
    for rank in range(size):
        found = torch.load(folder / f"result-{rank}.pt", weights_only=True)
        assert torch.equal(found, expected[rank])


def test_killed_and_resumed(pool: Pool, workers: Workers, tmp_path: Path) -> None:
    kill_at_random_and_resume(pool, workers, tmp_path, size=2, kills=3, seed=5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_and_resumed_twenty_times(pool: Pool, workers: Workers, tmp_path: Path, seed: int) -> None:
    kill_at_random_and_resume(pool, workers, tmp_path, size=2, kills=2, seed=seed)


def ids_until(folder: Path, steps: int | None) -> list[int]:
    """Train on examples that carry their number; save and stop after some steps, or go on to the end of the epoch."""
    dataset = TensorDataset(torch.arange(float(LENGTH))[:, None])
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    seen: list[int] = []
    with pl.Run(model, optimizer, dataset, batch=8) as run:
        if steps is None:
            run.resume(folder)
        for step in run.steps(epochs=1) if steps is None else run.steps(steps=steps):
            optimizer.zero_grad()
            for (x,) in step:
                seen += x.reshape(-1).int().tolist()
                step.backward(model(x).square().mean())
            optimizer.step()
        if steps is not None:
            run.save(folder / "step-00000004.ckpt")
    return seen


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_saved_by_four_resumed_by_fewer(pool: Pool, tmp_path: Path, workers: int) -> None:
    before = pool.run(4, ids_until, tmp_path, 4)
    after = pool.run(workers, ids_until, tmp_path, None)
    assert sum(map(len, before)) == 32
    assert sorted(one for part in [*before, *after] for one in part) == list(range(LENGTH))


def resume_with_damage(folder: Path) -> tuple[int, list[str]]:
    import warnings

    run, _ = build(None)
    with run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.resume(folder)
        return run.progress.step, [str(one.message) for one in caught]


def save_three(folder: Path) -> None:
    run, scheduler = build(pl.Checkpoint(folder, every=1, keep=3))
    with run:
        loop(run, scheduler, steps=4)


@pytest.mark.parametrize(("damage", "says"), [("cut", "cut short"), ("flip", "does not match its digest")])
def test_a_damaged_checkpoint_is_refused_and_the_previous_one_used(
    pool: Pool, tmp_path: Path, damage: str, says: str
) -> None:
    pool.run(2, save_three, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000002.ckpt", "step-00000003.ckpt", "step-00000004.ckpt"]
    newest = tmp_path / names[-1]
    content = bytearray(newest.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    for rank, (step, warned) in enumerate(pool.run(2, resume_with_damage, tmp_path)):
        assert step == 3
        if rank == 0:
            assert says in warned[0]
            assert names[-1] in warned[0]
            assert "Going on from" in warned[0]
