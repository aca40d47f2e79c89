from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sync_cost
from benchmarks.contestants import Contestant
from benchmarks.contestants.cost_worker import Start
from benchmarks.contestants.launch import ROOT

ABSENT = Contestant("absent", "somebody", "benchmarks.contestants.somebody", environment="nobody")
CRASHES = Contestant("crashes", "who crashes", "benchmarks.contestants.nobody")


def answer(seconds: float, **more: Any) -> dict[str, Any]:
    return {"seconds": seconds, "idle": 0.0, **more}


def test_the_slower_worker_counts_and_the_ratio_is_ours_over_the_other() -> None:
    rows = sync_cost.table(
        {
            "paceline": [[answer(1.0), answer(2.0)], [answer(2.0), answer(1.0)], [answer(2.0), answer(2.0)]],
            "other": [[answer(4.0), answer(1.0)], [answer(0.0), answer(5.0)], [answer(8.0), answer(8.0, idle=0.5)]],
        }
    )
    assert rows["paceline"]["ratio"] == 1.0
    assert rows["other"]["milliseconds"] == 5000.0
    assert rows["other"]["ratio"] == 0.4  # the median of 2 / 4, 2 / 5 and 2 / 8
    assert rows["other"]["quartiles"] == [0.25, 0.5]
    assert rows["other"]["idle_cores"] == 0.0


def test_who_does_not_synchronise_is_found_out() -> None:
    sync_cost.check("A", [{"own": 1, "shared": 3}, {"own": 2, "shared": 3}])
    sync_cost.check("A", [{"shared": 3}, {"shared": 3}])
    with pytest.raises(sync_cost.Failed, match="A: workers have different models"):
        sync_cost.check("A", [{"own": 1, "shared": 3}, {"own": 2, "shared": 4}])
    with pytest.raises(sync_cost.Failed, match="A: workers have the same model after a step of their own"):
        sync_cost.check("A", [{"own": 1, "shared": 3}, {"own": 1, "shared": 3}])


def test_who_takes_one_worker_for_the_average_is_found_out() -> None:
    sync_cost.compare_means({"A": [{"mean": -15.0}], "B": [{"mean": -15.01}]})
    sync_cost.compare_means({"A": [{}], "B": [{}]})
    with pytest.raises(sync_cost.Failed, match=r"different averages .*'B': -10"):
        sync_cost.compare_means({"A": [{"mean": -15.0}], "B": [{"mean": -10.0}]})


def test_workers_start_together(tmp_path: Path) -> None:
    Start.prepare(tmp_path / "start", 2)
    script = (
        "import sys; from pathlib import Path; from benchmarks.contestants.cost_worker import Start\n"
        "start = Start(Path(sys.argv[1]), 1)\n"
        "for _ in range(2): print('here', flush=True); start.wait(); print('gone', flush=True)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, str(tmp_path / "start")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, env=environment) as other:
        assert other.stdout is not None
        start = Start(tmp_path / "start", 0)
        for _ in range(2):
            assert other.stdout.readline() == b"here\n"
            # Who does not wait says so within microseconds.
            assert select.select([other.stdout], [], [], 0.3)[0] == []
            start.wait()
            assert other.stdout.readline() == b"gone\n"
        assert other.wait() == 0


@pytest.mark.slow  # a benchmark from end to end
def test_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    workload = sync_cost.Workload([8, 6, 4], 40, 40)
    monkeypatch.setattr(sync_cost, "WORKLOADS", {"tiny": workload})
    own = [one for one in sync_cost.ROSTER if one.environment is None]
    sync_cost.main(["--rounds", "0.05"], [*own, ABSENT], tmp_path)

    printed = capsys.readouterr().out
    assert "skipped: somebody: not installed: there is no .peers/nobody; run `make peers`" in printed
    results = json.loads(printed.splitlines()[-1])["results"]
    assert json.loads((tmp_path / "sync-cost.json").read_text())["results"] == results
    assert list(results["skipped"]) == ["absent"]
    for order in ("cost", "train"):
        assert list(results["tiny"][order]) == ["paceline", "post-local-sgd"]
        assert results["tiny"][order]["paceline"]["ratio"] == 1.0


class Parting:
    """A team whose workers end badly."""

    def __init__(self, ours: bool) -> None:
        self.ours = ours

    def part(self) -> None:
        raise sync_cost.Failed("rank 0 ended with -6")


def test_what_was_measured_outlives_a_peer_that_ends_badly(capsys: pytest.CaptureFixture[str]) -> None:
    theirs: Any = Parting(ours=False)
    sync_cost.dismiss([theirs])
    assert "rank 0 ended with -6" in capsys.readouterr().out
    ours: Any = Parting(ours=True)
    with pytest.raises(sync_cost.Failed, match="-6"):
        sync_cost.dismiss([ours])


def test_who_crashes_is_named() -> None:
    with pytest.raises(sync_cost.Failed, match=r"who crashes: rank . ended: .*No module named"):
        sync_cost.measure(sync_cost.Workload([8, 6, 4], 2, 0), [CRASHES])
