"""What a trial is, by the record of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from paceline.compare import Piece, Trial, read_trial
from paceline.compare.curves import curves, first_steps
from paceline.events import Event, Measured
from paceline.record import JsonLines
from tests.compare.fake import pieces, trial
from tests.record.fake import START, started, step


def write(folder: Path, events: Sequence[Event]) -> Path:
    recorder = JsonLines(folder / "events.jsonl")
    for event in events:
        recorder.record(event)
    recorder.close()
    return folder


def measured(at: int, **values: float) -> Measured:
    return Measured(START, at, values)


def test_an_accuracy_belongs_behind_the_step_in_which_it_was_logged(tmp_path: Path) -> None:
    events = [started(), step(0), measured(2, test_accuracy=0.5, evaluation_seconds=0.004), step(1), step(2)]
    events += [measured(3, accuracy=0.75, test_accuracy=0.7), measured(3, loss=1.0)]
    found = read_trial(write(tmp_path, events), "one")
    # Each step takes 10 ms, of which the second has 4 for the evaluation, and sends 4000 bytes.
    assert [(round(p.seconds, 6), p.examples, p.bytes_sent, p.accuracy) for p in found.points] == [
        (0.016, 128, 8000, 0.5),
        (0.026, 192, 12000, 0.7),
    ]
    assert found.seconds == pytest.approx(0.026)
    assert found.examples == 192
    assert found.waiting == pytest.approx(0.006 / 0.052)
    assert found.efficiency == pytest.approx(0.8)
    assert found.seconds_to(0.6) == pytest.approx(0.026)
    assert found.seconds_to(0.71) is None
    assert found.workers[1][2] == pytest.approx(Piece(0.016, 0.01, 16, 64, 0.001, 0.004, 0.002, 0.0005))


def test_what_is_logged_between_two_steps_belongs_there(tmp_path: Path) -> None:
    found = read_trial(write(tmp_path, [step(0), measured(1, accuracy=0.5), step(1)]), "one")
    assert found.points[0].examples == 64


@pytest.mark.parametrize("wrong", [96.0, -0.1, float("inf")])
def test_an_accuracy_that_is_no_share_is_told(tmp_path: Path, wrong: float) -> None:
    found = read_trial(write(tmp_path, [step(0), measured(1, accuracy=wrong), step(1)]), "one")
    assert found.error is not None
    assert "must be a share from 0 to 1" in found.error


def test_steps_with_an_evaluation_do_not_weigh_more(tmp_path: Path) -> None:
    quick = msgspec.structs.replace(step(0), efficiency=0.5)
    slow = msgspec.structs.replace(step(1, seconds=1.01), efficiency=1.0)
    found = read_trial(write(tmp_path, [quick, measured(2, evaluation_seconds=1.0), slow]), "one")
    assert found.efficiency == pytest.approx(0.75)


def test_each_worker_of_a_swarm_has_a_record(tmp_path: Path) -> None:
    one = {"load": [0.0], "compute": [0.005], "wait": [0.0]}
    for rank, number in ((0, 2), (2, 1), (10, 3)):
        write(tmp_path / f"worker-{rank}", [step(at, counts=[8], **one) for at in range(number)])  # type: ignore[arg-type]
    found = read_trial(tmp_path, "gossip")
    assert [len(each) for each in found.workers] == [2, 1, 3]
    assert found.examples == 48
    assert found.bytes_sent == 8000
    assert found.accuracy is None


def test_without_a_record_it_has_failed(tmp_path: Path) -> None:
    assert "no step was recorded" in str(read_trial(tmp_path, "one").error)
    assert read_trial(tmp_path, "one", error="exit code 3").error == "exit code 3"
    (tmp_path / "events.jsonl").write_text("nonsense\n")
    assert "not an event" in str(read_trial(tmp_path, "one").error)


def test_shares_and_waiting_in_the_course_of_time() -> None:
    slow = (*pieces(30, examples=10), *pieces(30, examples=30))
    slow = tuple(piece._replace(begin=at * 0.02) for at, piece in enumerate(slow))
    found = curves(Trial("one", 0, workers=(slow, pieces(60, examples=30, wait=0.01))))
    assert [round(share, 2) for _, share in found.shares[0]] == [0.25] * 10 + [0.5] * 10
    assert all(waiting == pytest.approx(0.5) for _, waiting in found.waiting[1])
    assert found.batch[0][1] == 20
    assert found.batch[-1][1] == 60
    assert found.shares[0][0][0] == pytest.approx(0.03)  # the middle of the first of twenty parts of 1.2 s


def test_no_step_is_no_curve() -> None:
    assert curves(Trial("one", 0)).batch == []
    assert first_steps(Trial("one", 0)) == []


def test_the_first_steps_are_those_of_rank_0() -> None:
    found = first_steps(Trial("one", 0, workers=(pieces(9), pieces(9, seconds=0.05))), count=5)
    assert [(name, len(each)) for name, each in found] == [("w0", 5), ("w1", 2)]
    assert len(first_steps(trial("one", steps=3))[0][1]) == 3
