"""A worker dies or freezes while each trains alone, or in the average: the others end soon and say why."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import paceline as pl
from paceline import sync
from paceline.testing import Workers
from tests.laws.test_local_sgd import Bar
from tests.pool import Pool, RemoteError
from tests.problems import data, mlp

DEADLINE = 3.0
PROMISE = DEADLINE + 10  # seconds, of the documentation
CULPRIT = 1


def train(kind: str, raise_at: int | None = None, early: bool = False, held: bool = False) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    roles: dict[str, Callable[[], sync.LocalSGD]] = {
        "rounds": lambda: sync.LocalSGD(4),
        "overlap": lambda: sync.LocalSGD(4, overlap=2),
        "seconds": lambda: sync.LocalSGD(sync.Seconds(0.2)),
        "sites": lambda: sync.Hierarchical(2, 4, site="ab"[int(os.environ["RANK"]) // 2]),
    }
    with pl.Run(model, optimizer, data(4000), batch=12, deadline=DEADLINE, sync=roles[kind]()) as run:
        steps = run.steps(epochs=1000)
        for step in Bar(steps) if held else steps:
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            if not early:
                optimizer.step()
            if step.index == raise_at and run.fleet.rank == CULPRIT:
                raise ValueError("a bad example")
            if early:
                optimizer.step()


@pytest.mark.parametrize(
    ("kind", "fault", "step", "stage", "size"),
    [
        ("rounds", "kill", 5, "computing", 3),
        ("rounds", "freeze", 7, "averaging models", 2),  # two workers swap their models
        ("overlap", "kill", 8, "computing", 2),  # the average of the round before is under way
        ("overlap", "freeze", 5, "updating", 3),
        ("seconds", "kill", 0, "computing", 3),  # the one step that every worker is sure to come to: the clock decides
        ("sites", "kill", 5, "averaging models in the site", 3),
        ("sites", "freeze", 7, "averaging models between sites", 3),
    ],
)
def test_the_others_end_and_say_why(workers: Workers, kind: str, fault: str, step: int, stage: str, size: int) -> None:
    """Whichever average they wait in, and whether they are at the site of the one that is lost or at another."""
    group = workers(train, kind, size=size)
    at = group.at(step=step, worker=CULPRIT, stage=stage)
    {"kill": at.kill, "freeze": at.freeze}[fault]()
    outcome = group.wait(DEADLINE + 60)
    why = "gave no sign of life" if fault == "freeze" else "(ended or lost its connection|gave no sign of life)"
    outcome.check_detected(within=PROMISE, error="WorkerLost", says=rf"rank {CULPRIT} {why} \(rank {CULPRIT}: last")
    # Before the first average the workers compare what they will average.
    what = "the others' settings" if kind == "seconds" else r"(the notes: )?the models( of the sites?)? after step \d+"
    for ending in outcome.others:
        says = rf"WorkerLost: rank {ending.worker}, in step \d+, waited [\d.]+ s for {what}: rank {CULPRIT} "
        assert re.search(says, ending.output), ending.output


def meets_an_error(kind: str, early: bool, held: bool) -> tuple[str, str]:
    """One worker raises in the body of the loop, in the middle of a round."""
    try:
        train(kind, raise_at=5, early=early, held=held)
    except (pl.WorkerLost, ValueError) as error:
        return type(error).__name__, str(error)
    return "ended", ""


@pytest.mark.parametrize("held", [False, True], ids=["", "held by a bar"])
@pytest.mark.parametrize("early", [True, False], ids=["before the optimizer", "after it"])
@pytest.mark.parametrize("kind", ["rounds", "overlap", "sites"])
def test_an_error_is_not_taken_for_a_break(pool: Pool, kind: str, early: bool, held: bool) -> None:
    found = pool.run(3, meets_an_error, kind, early, held)
    assert found[CULPRIT] == ("ValueError", "a bad example")
    for rank in (0, 2):
        name, told = found[rank]
        assert name == "WorkerLost"
        assert f"rank {CULPRIT} raised ValueError: a bad example" in told


def one_leaves(kind: str, call: str, tmp: str) -> str:
    """Worker 1 breaks in the first step of a round; the others need longer than the deadline to end it."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    roles: dict[str, Callable[[], sync.LocalSGD]] = {
        "rounds": lambda: sync.LocalSGD(8),
        "overlap": lambda: sync.LocalSGD(8, overlap=2),
        "sites": lambda: sync.Hierarchical(4, 8, site="ab"[int(os.environ["RANK"]) // 2]),
    }
    with pl.Run(model, optimizer, data(400), batch=12, deadline=1.0, sync=roles[kind]()) as run:
        for step in run.steps(steps=40):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if run.fleet.rank == CULPRIT:
                break
            time.sleep(0.4)
            if step.index == 3 and call == "save":
                run.save(f"{tmp}/checkpoint")
            if step.index == 3 and call == "consensus":
                with run.consensus():
                    pass
        return f"{run.progress.step} {run.replica.digest()}"


@pytest.mark.parametrize(("kind", "steps", "size"), [("rounds", 8, 2), ("overlap", 10, 3), ("sites", 8, 3)])
def test_who_has_left_waits_as_long_as_the_others_move_on(pool: Pool, kind: str, steps: int, size: int) -> None:
    found = pool.run(size, one_leaves, kind, "nothing", "")
    assert len(set(found)) == 1
    assert found[0].startswith(f"{steps} ")


@pytest.mark.parametrize("call", ["save", "consensus"])
def test_what_is_for_all_workers_names_the_one_that_has_left(pool: Pool, tmp_path: Path, call: str) -> None:
    """Not met by mistake in the average that it waits in."""
    found = pool.outcomes(3, one_leaves, "rounds", call, str(tmp_path))
    for rank in (0, 2):
        outcome = found[rank]
        assert isinstance(outcome, RemoteError)
        assert outcome.kind == "WorkerLost"
        says = (
            rf"for the others to call run\.{call}, which all workers must do: rank 1 is alive, but late "
            r"\(rank 1: .*averaging models"
        )
        assert re.search(says, outcome.text), outcome.text
