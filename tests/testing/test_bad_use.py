"""What cannot be right is an error before anything is started."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import SettingError
from paceline.lab import Cluster, Event, Link, Worker
from paceline.testing import Group, LabWorkers, Workers
from tests.testing import jobs

LINK = Link(10**8, 10**8)
CLUSTER = Cluster((Worker("a", 0, 0.5, LINK), Worker("b", 1, 0.5, LINK)))


@pytest.fixture
def group(workers: Workers) -> Iterator[Group]:
    group = workers(jobs.count, 5, size=2)
    yield group
    group.close()


@pytest.fixture
def lab_group(tmp_path: Path) -> Group:
    """It is never started, so that it needs no rights."""
    return LabWorkers(lambda: tmp_path)(CLUSTER, jobs.count, 5)


@pytest.mark.parametrize(
    ("moment", "says"),
    [
        ({"step": 1, "worker": 2}, "there is no worker 2: the group has 2, from 0 to 1"),
        ({"step": 1, "worker": -1}, "there is no worker -1"),
        ({"step": -1, "worker": 0}, "there is no step -1: steps are counted from 0"),
        ({"step": 1, "worker": 0, "delay": -1}, "a delay of -1 s is not possible"),
        ({"step": 1, "worker": 0, "delay": float("nan")}, "a delay of nan s is not possible"),
    ],
)
def test_moments(group: Group, moment: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        group.at(**moment)


def test_two_faults_at_one_moment(group: Group) -> None:
    group.at(step=1, worker=0).kill()
    group.at(step=1, worker=1).kill()
    group.at(step=1, worker=0, stage="updating").kill()
    with pytest.raises(SettingError, match=r"a fault at that moment already: kill worker 0 at step 1 \(computing\)"):
        group.at(step=1, worker=0).freeze()


def test_a_moment_without_a_fault(group: Group) -> None:
    group.at(step=1, worker=0)
    with pytest.raises(SettingError, match=r"worker 0 at step 1 \(computing\) says when, but not what"):
        group.wait(5)


@pytest.mark.parametrize("deed", [lambda at: at.cut(), lambda at: at.throttle(cpu=0.1)], ids=["cut", "throttle"])
def test_only_the_lab_can(group: Group, deed: Callable[[Any], None]) -> None:
    with pytest.raises(SettingError, match=r"\.(cut|throttle)\(\) needs links .* use the fixture lab_workers"):
        deed(group.at(step=1, worker=0))


@pytest.mark.parametrize(
    ("deed", "says"),
    [
        (lambda at: at.throttle(), r"throttle needs cpu"),
        (lambda at: at.throttle(cpu=0.5), r"cpu=0.5\) must be .* below what worker 0 has: 0.5"),
        (lambda at: at.throttle(cpu=0.01), r"at least 0.02"),
        (lambda at: at.throttle(rate="100mbit"), r"is no less than what worker 0 has"),
        (lambda at: at.throttle(rate="fast"), r"a rate of 'fast' is not understood"),
        (lambda at: at.cut(seconds=0), r"a fault cannot last 0 s"),
        (lambda at: at.freeze(seconds=float("inf")), r"a fault cannot last inf s"),
        (lambda at: at.signal(signal.SIGKILL), r"SIGKILL is what \.kill\(\) or \.freeze\(\) do"),
    ],
)
def test_faults(lab_group: Group, deed: Callable[[Any], None], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        deed(lab_group.at(step=1, worker=0))


@pytest.mark.parametrize(
    ("job", "args", "says"),
    [
        (lambda: None, (), r"<lambda> cannot be sent to other processes"),
        (jobs.count, (lambda: None,), r"count cannot be sent to other processes"),
        ("python train.py", (), r"'python train.py' is neither a function nor a command; a command is a list"),
        ([], (), r"is neither a function nor a command"),
        (["no-such-command"], (), r"the command 'no-such-command' does not exist"),
        (["sleep"], (3,), r"the arguments \(3,\) are for a function"),
    ],
)
def test_jobs(workers: Workers, job: Any, args: tuple[Any, ...], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        workers(job, *args, size=2)


def test_sizes(workers: Workers) -> None:
    with pytest.raises(SettingError, match="a group of 0 workers cannot be"):
        workers(jobs.count, 5, size=0)


@pytest.mark.parametrize(
    ("wait", "says"), [({"seconds": 0}, "cannot be waited for 0 s"), ({"seconds": 5, "besides": [2]}, "names worker 2")]
)
def test_waits(group: Group, wait: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        group.wait(**wait)


def test_after_its_end(workers: Workers) -> None:
    group = workers(["true"], size=1)
    group.wait(60).check_survivors([0])
    with pytest.raises(SettingError, match="has ended already; make a new one"):
        group.wait(60)
    with pytest.raises(SettingError, match="faults must be declared before"):
        group.at(step=1, worker=0)
    with pytest.raises(SettingError, match="can be started once"):
        group.start()


def test_a_group_with_faults_that_was_never_started(tmp_path: Path) -> None:
    starter = Workers(lambda: tmp_path)
    starter(jobs.count, 5, size=1).at(step=1, worker=0).kill()
    with pytest.raises(SettingError, match=r"never started; call group\.wait"):
        starter.close()


def test_events_by_the_clock(tmp_path: Path) -> None:
    cluster = Cluster(CLUSTER.workers, events=(Event(1.0, "a", "kill"),))
    with pytest.raises(SettingError, match="the cluster has events, which happen by the clock"):
        LabWorkers(lambda: tmp_path)(cluster, jobs.count, 5)
    with pytest.raises(SettingError, match="there is no cluster file 'nowhere'"):
        LabWorkers(lambda: tmp_path)("nowhere", jobs.count, 5)
