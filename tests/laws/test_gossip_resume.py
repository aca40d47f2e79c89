"""A gossip run that begins again: every worker from a checkpoint of its own, or from the model of one that has one."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline as pl
from paceline import sync
from paceline.codec import Identity
from tests.pool import Pool, RemoteError
from tests.problems import data, flat, mlp, train

LAST = 15  # a multiple of the rounds: who stands still at the last step has a partner there


def make(role: Any, folder: Path | None = None) -> pl.Run:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint = None if folder is None else pl.Checkpoint(folder, every=4, keep=1)
    return pl.Run(model, optimizer, data(80), batch=8, sync=role, checkpoint=checkpoint, deadline=30.0)


def lockstep(every: Any) -> sync.Gossip:
    """Two workers that wait for each other: what they do depends on nothing but their state."""
    return sync.Gossip(every, codec=Identity(), blocking=True)


def never_stopped(every: Any, folder: Path, stop: int) -> list[Tensor]:
    """The models after every step; what a checkpoint in the middle holds must be enough to come to the same."""
    models: list[Tensor] = []
    with make(lockstep(every)) as run:

        def each(step: pl.Step) -> None:
            models.append(flat(run.model))
            if step.index == stop - 1:
                assert run.save(folder / "at.ckpt") == folder / f"worker-{run.fleet.rank}" / "at.ckpt"

        train(run, run.model, each=each, steps=LAST)
    return models


def begun_again(every: Any, folder: Path) -> tuple[list[Tensor], pl.Progress, pl.Progress]:
    models: list[Tensor] = []
    with make(lockstep(every)) as run:
        assert run.resume(folder / "at.ckpt")
        at = run.progress
        train(run, run.model, each=lambda step: models.append(flat(run.model)), steps=LAST)
        return models, at, run.progress


@pytest.mark.parametrize(("every", "stop"), [(1, 5), (3, 7)], ids=["after every step", "in the middle of a round"])
def test_resume_equals_never_stopped(pool: Pool, tmp_path: Path, every: int, stop: int) -> None:
    expected = pool.run(2, never_stopped, every, tmp_path, stop)
    found = pool.run(2, begun_again, every, tmp_path)
    for ours, (models, at, end) in zip(expected, found, strict=True):
        assert at.step == stop
        assert at.examples <= 8 * stop  # what was heard of the other may be a little old
        assert at.examples >= 4 * stop
        assert end == pl.Progress(LAST, 8 * LAST // 80, 8 * LAST)
        assert torch.equal(torch.stack(ours[stop:]), torch.stack(models))


def by_itself(folder: Path) -> tuple[int, str, int]:
    """Train with a policy until all have saved themselves, and a little more."""
    with make(sync.Gossip(2), folder) as run:
        own = folder / f"worker-{run.fleet.rank}"

        def each(step: pl.Step) -> None:
            time.sleep(0.002)
            saved = [any((folder / f"worker-{rank}").glob("*.ckpt")) for rank in range(run.fleet.size)]
            if run.fleet.rank == 0 and step.index >= 20 and all(saved):
                run.stop()

        train(run, run.model, each=each, steps=10**9)
        return run.cursor.progress.step, ",".join(sorted(file.name for file in own.iterdir())), run.progress.examples


def signalled(folder: Path) -> tuple[object, list[str]]:
    """Every worker gets a signal in a step of its own, and ends alone."""
    rank = int(os.environ["RANK"])

    def each(step: pl.Step) -> None:
        if step.index == 5 + rank:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with make(sync.Gossip(2), folder) as run:
            train(run, run.model, each=each, steps=10**9)
    except pl.Interrupted as stop:
        return stop.code, [file.name for file in (folder / f"worker-{rank}").iterdir()]
    return 0, []


def test_a_signal_lets_a_worker_save_itself_and_end(pool: Pool, tmp_path: Path) -> None:
    for rank, (code, files) in enumerate(pool.run(2, signalled, tmp_path)):
        assert code == 143
        assert len(files) == 1
        # After the step in which it came, or the next, if that one's note had been made.
        assert files[0] in [f"step-{5 + rank + more:08d}.ckpt" for more in (1, 2)]


def resumed(folder: Path, missing_ok: bool = True) -> tuple[bool, int, Tensor, int, Tensor | None]:
    with make(sync.Gossip(2), folder) as run:
        fresh = flat(run.model)
        found = run.resume(folder, missing_ok=missing_ok)
        if found:
            assert not torch.equal(fresh, flat(run.model))
        at, model = run.cursor.progress.step, flat(run.model)
        buffers = [each["momentum_buffer"] for each in run.optimizer.state.values()]
        examples = run.progress.examples
        train(run, run.model, examples=examples + 160)
        assert run.progress.examples >= examples + 160
        return found, at, model, examples, buffers[0] if buffers else None


def test_everybody_saves_itself_and_all_resume(pool: Pool, tmp_path: Path) -> None:
    before = pool.run(3, by_itself, tmp_path)
    for steps, files, _ in before:
        assert files == f"step-{steps // 4 * 4:08d}.ckpt"
    after = pool.run(3, resumed, tmp_path)
    for (steps, _, _), (found, at, _, examples, momentum) in zip(before, after, strict=True):
        assert found
        assert at == steps // 4 * 4
        assert examples > 8 // 3 * at  # those of all, not only its own
        assert momentum is not None
    assert len({examples for _, _, _, examples, _ in after}) == 1  # of the latest checkpoint
    models = torch.stack([model for _, _, model, _, _ in after])
    assert not torch.equal(models[0], models[1])  # everybody's own


@pytest.mark.parametrize("lost", [0, 2])
def test_who_has_no_checkpoint_gets_a_model_of_one_that_has(pool: Pool, tmp_path: Path, lost: int) -> None:
    """A fresh model must not be averaged with trained ones."""
    pool.run(3, by_itself, tmp_path)
    shutil.rmtree(tmp_path / f"worker-{lost}")
    after = pool.run(3, resumed, tmp_path)
    found, at, given, examples, momentum = after[lost]
    assert found
    assert (at, momentum) == (0, None)
    assert examples == after[1][3] > 0
    assert any(torch.equal(given, model) for rank, (_, _, model, _, _) in enumerate(after) if rank != lost)


def partly_frozen(folder: Path, value: float) -> list[float]:
    """Some parameters are not trained, and have this value in the script: those before and after a resume."""
    model = mlp()
    first = next(model.parameters()).requires_grad_(False)
    torch.nn.init.constant_(first, value)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pl.Run(model, optimizer, data(80), batch=8, sync=sync.Gossip(2), deadline=30.0) as run:
        run.resume(folder / "at.ckpt", missing_ok=True)
        resumed = float(first.mean())
        train(run, model, steps=run.progress.step + 4)
        run.save(folder / "at.ckpt")
        return [resumed, float(first.mean())]


def test_what_is_frozen_is_given_with_the_model(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(3, partly_frozen, tmp_path, 7.0) == [[7.0, 7.0]] * 3
    shutil.rmtree(tmp_path / "worker-1")
    assert pool.run(3, partly_frozen, tmp_path, 1.0) == [[7.0, 7.0]] * 3


def test_there_may_be_more_workers(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, by_itself, tmp_path)
    assert [found for found, *_ in pool.run(3, resumed, tmp_path)] == [True] * 3


def test_without_any_checkpoint(pool: Pool, tmp_path: Path) -> None:
    for found, at, _, examples, _ in pool.run(2, resumed, tmp_path):
        assert (found, at, examples) == (False, 0, 0)
    shutil.rmtree(tmp_path)
    for outcome in pool.outcomes(2, resumed, tmp_path, False):
        assert isinstance(outcome, RemoteError)
        assert f"there is no checkpoint {tmp_path}" in outcome.text


def all_reduced(folder: Path) -> None:
    with make(sync.AllReduce(), folder) as run:
        train(run, run.model, steps=8)


def test_a_run_that_was_synchronous_goes_on_under_gossip(pool: Pool, tmp_path: Path) -> None:
    """Also if the workers' records are in the same folder already."""
    pool.run(2, all_reduced, tmp_path)
    for rank in range(2):
        own = tmp_path / f"worker-{rank}"
        own.mkdir()
        (own / "events.jsonl").touch()
    first, second = pool.run(2, resumed, tmp_path)
    assert first[:2] == second[:2] == (True, 8)
    assert first[3] == second[3] == 64
    assert torch.equal(first[2], second[2])


def used_more(folder: Path, more: int) -> tuple[int, int, int]:
    """How far all were, how many examples this worker has used since, and how far all are at the end."""
    with make(sync.Gossip(2)) as run:
        assert run.resume(folder)
        at, used = run.progress.examples, 0

        def each(step: pl.Step) -> None:
            nonlocal used
            used += 8 // run.fleet.size
            time.sleep(0.01)  # the others hear of it

        train(run, run.model, each=each, examples=at + more)
        return at, used, run.progress.examples


def check_goal(found: list[tuple[int, int, int]], more: int) -> None:
    """Who has not heard of the others' last steps goes on a little longer, but not as if nothing had been done."""
    used = sum(each for _, each, _ in found)
    assert more <= used < more + 400
    for at, _, end in found:
        assert at + more <= end <= at + used


def long_all_reduced(folder: Path) -> None:
    with make(sync.AllReduce()) as run:
        train(run, run.model, examples=1600)
        run.save(folder / "step-00000200.ckpt")


def test_the_goal_counts_what_a_synchronous_run_has_used(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, long_all_reduced, tmp_path)
    found = pool.run(2, used_more, tmp_path, 400)
    assert [at for at, _, _ in found] == [1600, 1600]
    check_goal(found, 400)


def long_gossip(folder: Path) -> None:
    with make(sync.Gossip(2), folder) as run:
        train(run, run.model, each=lambda step: time.sleep(0.002), examples=1600)


def test_the_goal_counts_what_workers_have_used_that_are_missing(pool: Pool, tmp_path: Path) -> None:
    pool.run(4, long_gossip, tmp_path)
    check_goal(pool.run(2, used_more, tmp_path, 400), 400)


def damaged(folder: Path) -> None:
    if os.environ["RANK"] == "1":
        file = folder / "worker-1" / "at.ckpt"
        file.write_bytes(file.read_bytes()[:-1])
    begun_again(1, folder)


def test_a_damaged_checkpoint_of_one_is_everybodys_error(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, never_stopped, 1, tmp_path, 5)
    first, second = pool.outcomes(2, damaged, tmp_path)
    assert isinstance(first, RemoteError)
    assert isinstance(second, RemoteError)
    assert "is cut short" in second.text
    assert "rank 1 raised CheckpointError" in first.text
