"""Local SGD that goes on from the middle of a round with another setting, or with what somebody wished for before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

import paceline as pl
from paceline import sync
from tests.laws.test_apart import Later
from tests.pool import Pool
from tests.problems import data, mlp, train

MINUTES = sync.Seconds(600.0)  # longer than a test takes: a round ends with what was dealt


def make(role: sync.LocalSGD, **settings: Any) -> pl.Run:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return pl.Run(model, optimizer, data(240), batch=12, sync=role, deadline=20.0, **settings)


def saved(folder: Path, at: int, overlap: int = 0, each: Callable[[pl.Run, pl.Step], None] | None = None) -> int:
    """Rounds of four steps; a checkpoint after so many steps. Gives the steps that were done."""
    with make(sync.LocalSGD(4, overlap=overlap)) as run:

        def save(step: pl.Step) -> None:
            if each is not None:
                each(run, step)
            if step.index + 1 == at:
                run.save(folder / "saved.ckpt")

        train(run, run.model, each=save, steps=12)
        return run.progress.step


def goes_on(folder: Path, role: sync.LocalSGD, steps: int, **settings: Any) -> tuple[list[tuple[int, list[int]]], str]:
    """The steps of each worker in every round that ended, by the number of its last step, and the model."""
    rounds: list[tuple[int, list[int]]] = []
    with make(role, **settings) as run:
        assert run.resume(folder / "saved.ckpt")

        def see(step: pl.Step) -> None:
            if step.round is not None:
                rounds.append((step.index, [int(note.steps) for note in step.round.notes]))

        train(run, run.model, each=see, steps=steps)
        return rounds, run.replica.digest()


def by_the_clock(folder: Path, at: int, overlap: int, every: Any) -> tuple[list[tuple[int, list[int]]], str]:
    saved(folder, at, overlap)
    return goes_on(folder, sync.LocalSGD(every), 14)


@pytest.mark.parametrize(
    ("at", "overlap", "every", "first"),
    [
        (6, 0, MINUTES, (6, [3, 3])),  # two steps of the round, and one more
        (6, 0, sync.PostLocal(2, MINUTES), (6, [3, 3])),
        (6, 0, Later(4, steps=4), (6, [3, 3])),
        (6, 0, Later(4, steps=5), (7, [4, 4])),  # the round began before rounds are measured by the clock
        (8, 0, MINUTES, (13, [6, 6])),  # no round was under way
        (8, 2, MINUTES, (8, [5, 5])),  # an average was: the four steps that it is of, and one more
        (9, 2, MINUTES, (9, [6, 6])),
    ],
)
def test_half_a_round_of_steps_ends_where_rounds_of_seconds_begin(
    pool: Pool, tmp_path: Path, at: int, overlap: int, every: Any, first: tuple[int, list[int]]
) -> None:
    (rounds, digest), other = pool.run(2, by_the_clock, tmp_path, at, overlap, every)
    assert rounds[0] == first
    assert rounds[-1][0] == 13
    assert other == (rounds, digest)


def back_from_seconds(folder: Path) -> list[tuple[int, list[int]]]:
    """One run trains by the clock, then goes back to the middle of a round of steps."""
    saved(folder, 6)
    rounds: list[tuple[int, list[int]]] = []
    with make(sync.LocalSGD(Later(4, steps=8))) as run:

        def see(step: pl.Step) -> None:
            if step.round is not None:
                rounds.append((step.index, [int(note.steps) for note in step.round.notes]))

        for _ in range(2):
            run.resume(folder / "saved.ckpt")
            rounds.clear()
            train(run, run.model, each=see, steps=14)
    return rounds


def test_how_the_last_round_was_measured_says_nothing_of_a_resumed_one(pool: Pool, tmp_path: Path) -> None:
    for rounds in pool.run(2, back_from_seconds, tmp_path):
        assert rounds[0] == (7, [4, 4])


def test_a_round_begins_in_the_epoch_of_its_first_step() -> None:
    """Also where it ends in the next: a period of the user's own may ask."""
    begins: list[tuple[int, int]] = []

    class Asks:
        def ends(self, begin: pl.Progress, now: pl.Progress) -> bool:
            begins.append((begin.step, begin.epoch))
            return now.step - begin.step >= 4

    with make(sync.LocalSGD(Asks())) as run:
        train(run, run.model, steps=24)  # of twenty in an epoch
    assert set(begins) == {(step, step // 20) for step in range(0, 24, 4)}


def without_overlap(folder: Path, every: int, leaves: bool) -> tuple[list[tuple[int, list[int]]], tuple[int, str]]:
    """From where an average was under way; one worker may leave before its first step."""
    saved(folder, 8, overlap=2)
    rounds: list[tuple[int, list[int]]] = []
    with make(sync.LocalSGD(every)) as run:
        run.resume(folder / "saved.ckpt")
        for step in run.steps(steps=14):
            if leaves and run.fleet.rank == 1:
                break
            run.optimizer.zero_grad()
            for x, y in step:
                step.backward(torch.nn.functional.cross_entropy(run.model(x), y))
            run.optimizer.step()
            if step.round is not None:
                rounds.append((step.index, [int(note.steps) for note in step.round.notes]))
        return rounds, (run.progress.step, run.replica.digest())


@pytest.mark.parametrize(
    ("every", "leaves", "expected"),
    [
        (1, False, [(8, [5, 5]), (9, [1, 1])]),
        (3, False, [(8, [4, 4]), (10, [3, 3])]),
        (1, True, [(8, [5, 4])]),
        (3, True, [(8, [4, 4]), (10, [3, 0])]),
    ],
)
def test_what_was_under_way_is_told_without_overlap(
    pool: Pool, tmp_path: Path, every: int, leaves: bool, expected: list[tuple[int, list[int]]]
) -> None:
    (rounds, end), (_, other) = pool.run(2, without_overlap, tmp_path, every, leaves)
    assert rounds[: len(expected)] == expected
    assert end == other
    assert end[0] == (14 if not leaves else expected[-1][0] + 1)


def wished_to_stop(folder: Path, overlap: int) -> tuple[int, int]:
    """Steps of a run that somebody stops, and of one that goes on from a checkpoint made before it did."""

    def stop(run: pl.Run, step: pl.Step) -> None:
        if step.index == (2 if overlap else 3) and run.fleet.rank == 1:
            run.stop()  # seen with the next step

    at = 5 if overlap else 6
    ended = saved(folder, at, overlap, stop)
    with make(sync.LocalSGD(4, overlap=overlap)) as run:
        run.resume(folder / "saved.ckpt")
        train(run, run.model, steps=14)
        return ended, run.progress.step


@pytest.mark.parametrize("overlap", [0, 2], ids=["in the round", "under way"])
def test_a_wish_to_stop_is_not_that_of_a_resumed_run(pool: Pool, tmp_path: Path, overlap: int) -> None:
    for ended, resumed in pool.run(2, wished_to_stop, tmp_path, overlap):
        assert ended in (6, 8)
        assert resumed == 14


def saves_by_itself(folder: Path, at: int, resume: bool) -> str:
    """A save of the run's own brings all together when the average lands that was under way at ours."""
    with make(sync.LocalSGD(4, overlap=2), checkpoint=pl.Checkpoint(folder / "own", every=3)) as run:
        if resume:
            run.resume(folder / "saved.ckpt")

        def save(step: pl.Step) -> None:
            if step.index + 1 == at and not resume:
                run.save(folder / "saved.ckpt")

        train(run, run.model, each=save, steps=14)
        return run.replica.digest()


@pytest.mark.parametrize("at", [3, 5], ids=["in the round", "under way"])
def test_a_save_that_was_due_is_done_by_the_resumed_run(pool: Pool, tmp_path: Path, at: int) -> None:
    """Else it would go on with another model than the run that did not stop."""
    never = pool.run(2, saves_by_itself, tmp_path, at, False)
    assert pool.run(2, saves_by_itself, tmp_path, at, True) == never
    assert len(set(never)) == 1
