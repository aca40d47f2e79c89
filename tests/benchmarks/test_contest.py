"""The contest: contestants end and are judged rightly, and those that fail are shown with the reason."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import contest
from benchmarks.contestants import ROSTER, Contestant, bout, judge, launch, table
from benchmarks.contestants.judge import Mark, Verdict
from benchmarks.contestants.race import next_snapshot, stop_step

LIMIT = 120.0  # seconds: a hang is a failed test, not a stuck suite

Snapshot = dict[str, Any]


def write(folder: Path, rank: int, *snapshots: tuple[float, list[float]], together: bool = True) -> None:
    """Snapshots of one worker: its clock and its parameters, 10 steps of 4 examples apart."""
    (folder / str(rank)).mkdir()
    for number, (seconds, parameters) in enumerate(snapshots):
        step = 10 * (number + 1)
        what = {"step": step, "examples": 4 * step, "seconds": seconds, "parameters": torch.tensor(parameters)}
        what |= {"life": 0, "together": together}
        torch.save(what, folder / str(rank) / f"{number:06d}.pt")


def first(parameters: Tensor) -> float:
    """A measure of models for the tests: the first parameter is the accuracy."""
    return float(parameters[0])


def test_the_judge_averages_and_takes_the_slowest_clock(tmp_path: Path) -> None:
    write(tmp_path, 0, (1.0, [0.0, 1.0]), (2.0, [0.25, 1.0]), (3.0, [0.5, 1.0]), (4.0, [0.0, 1.0]))
    write(tmp_path, 1, (1.5, [0.0, 3.0]), (2.5, [0.75, 3.0]), (3.5, [1.0, 3.0]), (4.5, [0.5, 3.0]))
    seen: list[list[float]] = []

    def evaluate(parameters: Tensor) -> float:
        seen.append(parameters.tolist())
        return first(parameters)

    # One worker alone has 0.75 at the second moment, the average 0.5; at the end it has fallen again.
    verdict = judge.judge(tmp_path, 2, 0.6, evaluate)
    # To rounding in float32, which is 1e-7.
    assert verdict.disagreement == pytest.approx(math.hypot(0.25, 1.0) / math.hypot(0.25, 2.0))
    known = replace(verdict, disagreement=0.0)
    assert known == Verdict(3.5, final_accuracy=0.25, seconds=4.5, steps=40, examples=320, disagreement=0.0)
    assert seen == [[0.0, 2.0], [0.5, 2.0], [0.75, 2.0], [0.25, 2.0]]


@pytest.mark.parametrize(("target", "seconds"), [(0.5, 4.0), (0.8, 8.0), (0.9, None)])
def test_who_stops_by_the_own_clock_is_judged_by_the_clock(
    tmp_path: Path, target: float, seconds: float | None
) -> None:
    write(tmp_path, 0, (1.0, [0.0]), (4.0, [0.5]), (6.0, [0.75]), (7.0, [0.75]), together=False)
    write(tmp_path, 1, (2.0, [0.5]), (8.0, [1.0]), together=False)
    verdict = judge.judge(tmp_path, 2, target, first)
    # At 1 s the second worker has none; at 4 s both have 0.5, at 6 and 7 s 0.75 and 0.5, in the end 0.875.
    assert verdict == Verdict(seconds, 0.875, seconds=8.0, steps=40, examples=240, disagreement=0.125 / 0.875)


@pytest.mark.parametrize("counts", [[1], [3, 3], [2, 5, 4]])
def test_moments_of_those_that_wait_for_each_other(counts: list[int]) -> None:
    found = judge.moments([[Mark(10 * at, at + 0.1 * rank) for at in range(c)] for rank, c in enumerate(counts)])
    last = {rank: count - 1 for rank, count in enumerate(counts)}
    same = [dict.fromkeys(range(len(counts)), at) for at in range(min(counts))]
    assert found == (same if same[-1] == last else [*same, last])


def test_moments_of_those_that_do_not() -> None:
    fast = [Mark(step, seconds, together=False) for step, seconds in ((5, 1.0), (10, 2.0), (15, 3.0), (20, 4.0))]
    slow = [Mark(5, 1.5, together=False), Mark(10, 3.5, together=False)]
    assert judge.moments([fast, slow]) == [{0: 1, 1: 0}, {0: 2, 1: 0}, {0: 3, 1: 1}]


def test_who_was_killed_counts_until_then_and_when_it_is_back() -> None:
    marks = [Mark(at, float(at), together=False) for at in range(1, 7)]
    lost = judge.Lost(1, 2.5)
    gone = judge.moments([marks, marks[:2]], lost)
    assert gone == [{0: 0, 1: 0}, {0: 1, 1: 1}, {0: 2}, {0: 3}, {0: 4}, {0: 5}]
    back = judge.moments([marks, [*marks[:2], *marks[4:]]], lost)
    assert back == [{0: 0, 1: 0}, {0: 1, 1: 1}, {0: 2}, {0: 3}, {0: 4, 1: 2}, {0: 5, 1: 3}]
    # All at the same steps: what was done before all began again is another moment than the same step afterwards.
    before, after = [Mark(5, 1.0), Mark(10, 2.0)], [Mark(10, 8.0, life=1), Mark(15, 9.0, life=1)]
    again = judge.moments([before + after, before[:1] + after], lost)
    assert again == [{0: 0, 1: 0}, {0: 2, 1: 1}, {0: 3, 1: 2}]


def test_what_is_not_a_training_is_disqualified(tmp_path: Path) -> None:
    write(tmp_path, 0, (1.0, [0.5]), (2.0, [math.nan]))
    with pytest.raises(judge.Disqualified, match="no snapshot of rank 1"):
        judge.judge(tmp_path, 2, 0.5, first)
    with pytest.raises(judge.Disqualified, match="not finite"):
        judge.judge(tmp_path, 1, 0.5, first)


def test_medians_and_spread() -> None:
    rounds: list[dict[str, Any]] = [{"a": 3.0, "b": 1}, {"failed": "exit 1"}, {"a": None, "b": 5}, {"a": 2.0, "b": 2}]
    assert table.summarise(rounds) == {
        "rounds": 3,
        "failures": ["exit 1"],
        "a": 3.0,
        "b": 2,
        "spread": {"a": [2.0, None], "b": [1, 5]},
    }
    died = table.summarise([{"b": 2, "died": "lost"}, {"b": 4}, {"failed": "late"}])
    assert died == {"rounds": 2, "failures": ["lost", "late"], "b": 3.0, "spread": {"b": [2, 4]}}
    assert table.summarise([{"a": None}, {"a": 2.0}])["a"] is None
    assert table.summarise([{"b": 2}, {"b": 5}])["b"] == 3.5
    assert table.summarise([{"b": 2}]) == {"rounds": 1, "failures": [], "b": 2}
    assert table.summarise([{"failed": "late"}]) == {"rounds": 0, "failures": ["late"]}


@pytest.mark.parametrize("lockstep", [1, 2, 16])
def test_nobody_can_be_past_the_step_at_which_all_stop(lockstep: int) -> None:
    for meeting in range(lockstep):  # the place of the step, among so many, at which workers wait for each other
        for done in range(50):
            ahead = done  # how far others can get while rank 0 has done this many
            while (ahead + 1) % lockstep != meeting:
                ahead += 1
            assert ahead < stop_step(done, lockstep) <= done + 2 * lockstep


def test_snapshots_get_rarer() -> None:
    step, steps = 0, []
    while step < 10_000:
        step = next_snapshot(step, 10)
        steps.append(step)
    assert steps[:3] == [10, 20, 30]
    assert len(steps) < 110
    assert all(after - before <= max(10, before / 20) for before, after in pairwise(steps))


def run(tmp_path: Path, script: str, limit: float) -> launch.Outcome:
    return launch.run_workers("local", 2, [sys.executable, "-c", script], tmp_path, limit)


def test_workers_are_started_as_by_torchrun(tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "PYTHONPATH")
    script = f"import os; print([os.environ[name] for name in {names}])"
    outcome = run(tmp_path, script, LIMIT)
    assert outcome.failure is None
    assert [(row["rank"], row["exit"], row["bytes_sent"]) for row in outcome.workers] == [(0, 0, None), (1, 0, None)]
    for rank in range(2):
        told = f"['{rank}', '2', '0', '127.0.0.1', '{launch.ROOT}']"
        assert launch.tail(tmp_path / f"output-{rank}.txt") == told


def test_one_worker_fails_and_the_other_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PARTING", 0.2)
    waits = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(20)"
    outcome = run(tmp_path, f"import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('oh no')\n{waits}", LIMIT)
    assert outcome.failure == "exit 1: oh no"
    assert [row["rank"] for row in outcome.workers] == [1]  # the other was not waited for
    if pid := launch.tail(tmp_path / "pid"):  # it may have been ended before it came so far
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_what_hangs_is_killed(tmp_path: Path) -> None:
    outcome = run(tmp_path, "import time; time.sleep(600)", 0.2)
    assert outcome == launch.Outcome("killed: it had not ended after 0 s", [])


def lab_row(name: str, exit: int, ended_by: str | None, wall_seconds: float) -> dict[str, Any]:
    return {
        "name": name,
        "rank": int(name[1:]),
        "exit": exit,
        "ended_by": ended_by,
        "started": 0.0,
        "wall_seconds": wall_seconds,
    }


def test_the_reason_is_that_of_the_worker_that_failed_first(tmp_path: Path) -> None:
    for name in ("w0", "w1", "w2"):
        (tmp_path / f"{name}.log").write_text(f"much\n\nlast words\nof {name}\n\n")
    rows = [lab_row("w0", 2, None, 9.0), lab_row("w1", 3, None, 5.0), lab_row("w2", -9, "limit of 8 s", 4.0)]
    assert launch.lab_failure(2, rows, tmp_path, 8.0) == "exit 3: much\nlast words\nof w1"
    assert launch.lab_failure(124, rows[2:], tmp_path, 8.0) == "killed: it had not ended after 8 s"
    (tmp_path / "output.txt").write_text("another lab is running\n")
    assert launch.lab_failure(1, [], tmp_path, 8.0) == "exit 1: another lab is running"
    assert launch.lab_failure(137, rows[1:2], tmp_path, 8.0, spare=1) is None
    assert launch.lab_failure(2, rows[:2], tmp_path, 8.0, spare=1) == "exit 2: much\nlast words\nof w0"
    assert launch.lab_failure(124, rows[1:], tmp_path, 8.0, spare=1) == "killed: it had not ended after 8 s"
    assert launch.lab_failure(0, [lab_row("w0", -9, "kill event", 4.0)], tmp_path, 8.0) is None


ABSENT = Contestant("absent", "somebody", "benchmarks.contestants.somebody", environment="nobody")
CRASHES = Contestant("crashes", "who crashes", "benchmarks.contestants.nobody", note="chosen: {every}")


@pytest.mark.slow  # from end to end
def test_a_contest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    looked: dict[int, list[list[Snapshot]]] = {}

    def spy(
        folder: Path, workers: int, target: float, evaluate: Callable[[Tensor], float], lost: judge.Lost | None
    ) -> Verdict:
        files = [sorted((folder / str(rank)).iterdir()) for rank in range(workers)]
        looked[len(looked)] = [[torch.load(file, weights_only=True) for file in mine] for mine in files]
        return judge.judge(folder, workers, target, evaluate, lost)

    monkeypatch.setattr(bout, "judge", spy)
    own = [one for one in ROSTER if one.name in ("ddp", "paceline-all-reduce")]
    arguments = ["--task", "digits", "--seconds", "1.5", "--target", "0.2", "--every", "7"]
    contest.main(arguments, [*own, ABSENT, CRASHES], tmp_path)

    assert len(looked) == 2
    for workers in looked.values():
        assert workers[0][-1]["step"] == workers[1][-1]["step"]  # they stopped together
        assert workers[0][-1]["seconds"] >= 1.5
    # The same examples in the same order, and Paceline's gradients are DDP's, to the bit, with two workers. Later in
    # the epoch they are not: DDP drops what does not fill a step, Paceline does not.
    by_torch, by_paceline = (looked[at][0][1] for at in range(2))
    assert by_torch["step"] == by_paceline["step"] == 10
    assert torch.equal(by_torch["parameters"], by_paceline["parameters"])

    printed = capsys.readouterr().out
    assert "failed: somebody: not installed: there is no .peers/nobody; run `make peers`" in printed
    assert "failed: who crashes: exit 1:" in printed
    assert "No module named benchmarks.contestants.nobody" in printed
    assert "[1] chosen: 7" in printed
    results = json.loads(printed.splitlines()[-1])["results"]
    assert json.loads((tmp_path / "contest-local-digits.json").read_text())["results"] == results
    assert results["cluster"] == "local"
    assert list(results["contestants"]) == ["ddp", "paceline-all-reduce", "absent", "crashes"]
    for name in ("ddp", "paceline-all-reduce"):
        found = results["contestants"][name]
        assert found["failures"] == []
        assert found.keys() >= table.FIELDS.keys()
        assert 0 < found["time_to_target"] <= found["seconds"]
        assert found["final_accuracy"] > 0.2  # guessing gets 0.1
        assert found["examples"] > 0
        assert found["cpu_seconds"] > 0
        assert found["disagreement"] == 0.0
        assert found["bytes_sent"] is found["largest_wait"] is None  # not known without the lab
    for name in ("absent", "crashes"):
        assert results["contestants"][name]["rounds"] == 0
        assert len(results["contestants"][name]["failures"]) == 1
