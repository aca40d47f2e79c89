"""A worker dies, freezes, is cut off, raises, diverges or leaves: the others end soon and say why."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from paceline import checkpoint
from paceline.testing import LabWorkers, Outcome, Workers
from tests.faults.worker import CULPRIT, DEADLINE, STEP, train

WORKERS = 4
PROMISE = DEADLINE + 10  # seconds, of the documentation


def check_what_they_waited_for(outcome: Outcome) -> None:
    for ending in outcome.others:
        says = rf"WorkerLost: rank {ending.worker}, in step \d+, waited [\d.]+ s for the (gradients|notes) of step \d+"
        assert re.search(says, ending.output), ending.output


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "ddp"])
@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("kill", "WorkerLost", r"rank 2 (ended or lost its connection|gave no sign of life) \(rank 2: last heartbeat"),
        ("freeze", "WorkerLost", r"rank 2 gave no sign of life \(rank 2: last heartbeat [\d.]+ s ago"),
        ("raise", "WorkerLost", r"rank 2 raised ValueError: something is wrong with this batch"),
        ("nan", "NonFiniteLoss", r"NonFiniteLoss: the loss in step 7 is not finite \(rank 2: nan\)"),
        ("break", "WorkerLost", r"rank 2 left the training loop"),
    ],
)
def test_the_others_end_and_say_why(workers: Workers, fault: str, error: str, says: str, wrap: bool) -> None:
    group = workers(train, fault, wrap, size=WORKERS)
    at = group.at(step=STEP, worker=CULPRIT)
    {"kill": at.kill, "freeze": at.freeze}.get(fault, at.mark)()
    outcome = group.wait(DEADLINE + 60, besides=[CULPRIT] if fault == "break" else [])
    outcome.check_detected(within=PROMISE, error=error, says=says)
    if error == "WorkerLost":
        check_what_they_waited_for(outcome)
    if fault in ("raise", "nan"):
        assert outcome.endings[CULPRIT].code == 1


@pytest.mark.parametrize("size", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_the_worker_that_hosts_the_store_freezes(workers: Workers, size: int) -> None:
    """Nobody can ask the store then who is missing: every question has a limit, whatever the number of workers."""
    group = workers(train, "freeze", size=size)
    group.at(step=STEP, worker=0).freeze()
    outcome = group.wait(DEADLINE + 60)
    outcome.check_detected(within=PROMISE, error="WorkerLost", says=r"rank 0 gave no sign of life")


@pytest.mark.parametrize(
    ("number", "loaders"),
    [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGTERM, 1)],
)
def test_a_signal_to_one_worker_stops_all_with_a_checkpoint(
    workers: Workers, tmp_path: Path, number: signal.Signals, loaders: int
) -> None:
    """Where there are loader processes, they get the signal, too, as from a terminal or a scheduler."""
    group = workers(train, "signal", False, tmp_path, loaders, size=WORKERS)
    group.at(step=STEP, worker=CULPRIT).signal(number)
    outcome = group.wait(60)
    for ending in outcome.endings:
        assert ending.code == 128 + number, str(outcome)
        assert "Traceback" not in ending.output
    assert f"{loaders} loader processes" in outcome.endings[CULPRIT].output
    (saved,) = checkpoint.find(tmp_path)
    assert checkpoint.parse(checkpoint.read(saved))["cursor"]["progress"]["step"] == STEP + 1


def test_a_worker_whose_link_is_cut(lab_workers: LabWorkers, tmp_path: Path) -> None:
    (tmp_path / "three.toml").write_text('[[worker]]\ncount = 3\ncpu = 0.6\nrate = "100mbit"\n')
    group = lab_workers(tmp_path / "three.toml", train, "cut")
    group.at(step=STEP, worker=CULPRIT).cut()
    outcome = group.wait(DEADLINE + 60)
    outcome.check_detected(within=PROMISE, error="WorkerLost", says=r"rank 2 gave no sign of life")
    check_what_they_waited_for(outcome)
    assert outcome.survivors == ()  # the worker that was cut off has lost all others
