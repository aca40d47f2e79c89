"""The hard cluster: its machines, who takes part, what is kept, and what happens when a worker is killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from benchmarks import bench, contest, hard_cluster
from benchmarks.contestants import HARD, ROSTER, Contestant, bout, launch, ours
from benchmarks.contestants.job import Job, Settings
from benchmarks.contestants.race import Race
from paceline import tasks
from paceline.lab.file import read_cluster

OURS = [one for one in HARD if one.module == ours.__name__]


def job_in(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Job:
    """The job of one worker alone."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")  # only looked at, never opened
    settings: dict[str, Any] = {"batch": 8, "lr": 0.1, "momentum": 0.9, "every": 4, "seconds": 60.0}
    settings |= {"snapshot_every": 2, "data": str(folder / "data.pt"), "initial": "", "model": "", "arguments": []}
    torch.save((torch.zeros(64, 2), torch.zeros(64).long()), folder / "data.pt")
    Settings(**{**settings, **changes}).write(folder)
    return Job(folder)


def test_the_machines() -> None:
    cluster = read_cluster(hard_cluster.CLUSTER, cores=2)
    assert [worker.cpu for worker in cluster.workers] == [1.0, 0.5, 0.25, 0.25]
    assert {(worker.link.up, worker.link.down) for worker in cluster.workers} == {(50 * 10**6, 50 * 10**6)}


def test_who_takes_part() -> None:
    names = [one.name for one in HARD]
    assert len(set(names)) == len(names)
    assert {one.name for one in ROSTER} <= set(names)
    recipes = {"recipe-uneven", "recipe-slow-links", "recipe-unreliable", "recipe-everything"}
    assert recipes < {one.arguments[0] for one in OURS}
    assert {one.comes_back for one in HARD if one.module != ours.__name__} == {"never"}
    assert {one.name for one in HARD if one.comes_back == "alone"} == {"paceline-gossip", "unreliable"}


@pytest.mark.parametrize("contestant", OURS, ids=lambda one: one.name)
def test_the_roles_of_ours_go_together(contestant: Contestant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_in(tmp_path, monkeypatch)
    roles = ours.VARIANTS[contestant.arguments[0]](job)
    lockstep = roles.pop("lockstep", 1)
    sync = roles.get("sync")
    assert lockstep is None or lockstep >= 1
    by_clock = isinstance(sync, pl.sync.Gossip) or (
        isinstance(sync, pl.sync.LocalSGD) and isinstance(sync.every, pl.sync.Seconds)
    )
    assert (lockstep is None) == by_clock  # whose numbers of steps differ stop by their own clocks
    if isinstance(sync, pl.sync.Gossip):
        return  # it needs two workers
    model = nn.Linear(2, 2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    optimizer = job.optimizer(model.parameters())
    dataset = torch.utils.data.TensorDataset(job.x, job.y)
    with pl.Run(model, optimizer, dataset, **{"batch": job.batch, **roles}) as run:
        assert run.batch.size(run.progress) == job.batch


def test_all_data_are_handed_out() -> None:
    task = tasks.load("digits")
    x, y = contest.tensors(task.train)
    assert len(x) == len(y) == len(task.train)
    assert torch.equal(x[7], task.train[7][0])


def test_what_is_started_where_a_worker_is_killed(tmp_path: Path) -> None:
    by_name = {one.name: one for one in HARD}

    def words(name: str, unreliable: bool) -> str:
        return " ".join(bout.command_of(by_name[name], tmp_path, unreliable=unreliable))

    assert all(bout.AGAIN not in words(name, False) and "--independent" not in words(name, False) for name in by_name)
    assert words("ddp", True) == words("ddp", False)
    assert f"-m {bout.AGAIN} {bout.RESTARTS} {ours.__name__} {tmp_path} all-reduce" in words(
        "paceline-all-reduce", True
    )
    assert "paceline run --independent --workers 1" in words("unreliable", True)


def test_a_second_life_goes_on_with_the_clock_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_in(tmp_path, monkeypatch)
    model = nn.Linear(2, 2)
    first = Race(job, model, lockstep=None)
    first.start()
    for _ in range(5):
        first.step(8)  # snapshots after 2 and 4 steps
    since = float((tmp_path / "clock-0").read_text())
    for steps, counts in ((3, (3, 16)), (None, (4, 32)), (0, (0, 0))):
        second = Race(job, model, lockstep=None)
        second.start(steps)
        assert (second.steps, second.examples) == counts
        assert second._began == since
    second.step(8)
    second.step(8)
    files = sorted((tmp_path / "snapshots" / "0").iterdir())
    assert [torch.load(file)["step"] for file in files] == [2, 4, 2]


def test_a_worker_is_killed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append((group, number)))
    for lost, times in ((1, 0), (0, 1)):
        job = job_in(tmp_path, monkeypatch, lost=lost)
        race = Race(job, nn.Linear(2, 2), lockstep=None)
        race.start()
        for _ in range(3):
            race.step(8)
        assert len(killed) == times


def test_what_was_trained_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails: dict[str, dict[str, Any]] = {"ddp": {"failed": "oh no"}, "ddp-fp16": {"failed": "-", "unstarted": True}}
    trained: list[str] = []

    def let(self: bout.Bout, contestant: Contestant, seconds: float) -> dict[str, Any]:
        trained.append(f"{contestant.name} {seconds:g}")
        return fails[contestant.name]

    monkeypatch.setattr(bout.Bout, "let", let)
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "bench.py"))
    two = ["--task", "digits", "--keep", "--seconds", "3", "--only", "ddp", "--only", "ddp-fp16"]
    contest.main([*two, "--seeds", "2"], HARD, tmp_path)
    assert trained == ["ddp 3", "ddp-fp16 3"] * 2
    contest.main([*two, "--seeds", "3"], HARD, tmp_path)  # what was not started is tried again
    assert trained[4:] == ["ddp-fp16 3"] * 2 + ["ddp 3", "ddp-fp16 3"]
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert results["contestants"]["ddp"] == {"rounds": 0, "failures": ["oh no"] * 3}
    assert results["seeds"] == [0, 1, 2]
    del trained[:]
    one = two[:-2]
    for more in (["--more", "ddp=9"], ["--unreliable"], ["--anew"], []):  # other settings, or asked for
        contest.main([*one, *more], HARD, tmp_path)
    assert trained == ["ddp 9", "ddp 3", "ddp 3"]


@pytest.mark.parametrize(("failure", "attempts"), [("exit 1: a lab is already running on this", 3), ("exit 1: no", 1)])
def test_another_lab_is_waited_for(
    failure: str, attempts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = [launch.Outcome(failure, []), launch.Outcome(failure, []), launch.Outcome("exit 2: oh", [{}])]
    started: list[str] = []

    def run_workers(cluster: str, *rest: object) -> launch.Outcome:
        started.append(cluster)
        return outcomes[len(started) - 1]

    monkeypatch.setattr(bout, "run_workers", run_workers)
    monkeypatch.setattr(bout, "PAUSE", 0.0)
    settings = job_in(tmp_path, monkeypatch).settings
    one = bout.Bout(settings, 0.5, lambda parameters: 0.0, "hard", 0, 0.0, tmp_path / "job")
    expected: dict[str, Any] = {"failed": "exit 2: oh"} if attempts == 3 else {"failed": failure, "unstarted": True}
    assert one.let(HARD[0], 1.0) == expected
    assert started == ["hard"] * attempts


@pytest.mark.slow  # from end to end
@pytest.mark.parametrize("names", [("ddp", "paceline-all-reduce"), ("unreliable",)], ids=" and ".join)
def test_a_worker_is_killed_on_the_way(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    only = [word for name in names for word in ("--only", name)]
    arguments = ["--task", "digits", "--seconds", "15", "--target", "0.5", "--unreliable", "--alone", "1", *only]
    contest.main(arguments, HARD, tmp_path)
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["contestants"]
    for name in names:
        found = results[name]
        assert found["rounds"] == 1
        assert found["time_to_target"] < 6.0 if name == "ddp" else found["final_accuracy"] > 0.5
        assert found["alone_before"] > 0
        assert 0 < found["efficiency"] < 1
        if name == "ddp":
            assert found["back_after"] is None
            assert found["failures"][0].startswith("lost with the worker: exit 1:")
        else:
            assert found["back_after"] > 0
            assert found["failures"] == []
