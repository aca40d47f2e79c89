"""Links that are cut and workers that are throttled, in the lab; skipped where it cannot work."""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.errors import LabError
from paceline.lab.remains import LOCK
from paceline.testing import LabWorkers, fixtures, places
from tests.testing import jobs

CLUSTER = """
[[worker]]
count = 2
cpu = 0.9
rate = "100mbit"
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    (tmp_path / "two.toml").write_text(CLUSTER)
    return tmp_path / "two.toml"


def test_throttled_and_cut(lab_workers: LabWorkers, cluster: Path) -> None:
    """The first worker answers the second; both say what the kernel grants them, and how it ended."""
    group = lab_workers(cluster, jobs.talk)
    group.at(step=3, worker=1).throttle(cpu=0.5, rate="20mbit")
    group.at(step=6, worker=1).cut()
    first, second = (ending.output for ending in group.wait(60).endings)
    steps = re.findall(r"step (\d): (\S+) cores, (\S+)", second)
    assert steps == [(str(step), *(("0.9", "100Mbit") if step < 3 else ("0.5", "20Mbit"))) for step in range(7)]
    assert second.endswith("heard nothing\n")
    assert first.endswith("heard nothing\n")


def test_cut_for_a_while(lab_workers: LabWorkers, cluster: Path) -> None:
    group = lab_workers(cluster, jobs.talk)
    group.at(step=6, worker=0).cut(seconds=0.5)
    outcome = group.wait(60)
    outcome.check_survivors([0, 1])
    assert "heard nothing" not in outcome.endings[1].output


def test_without_the_lab_it_is_skipped_with_the_reason(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixtures._missing.cache_clear()
    monkeypatch.setattr(fixtures, "missing", lambda: ["it must be run as root", "tc is not installed"])
    with pytest.raises(pytest.skip.Exception, match="cannot work here: it must be run as root; tc is not installed"):
        request.getfixturevalue("lab_workers")
    fixtures._missing.cache_clear()


@contextmanager
def somebody_elses_lab() -> Iterator[None]:
    with open(LOCK, "a+b") as file:
        end = time.monotonic() + 120
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < end, "the lab is in use for too long"
                time.sleep(0.1)
        yield


def test_a_lab_that_stays_in_use_is_an_error(
    lab_workers: LabWorkers, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "TURN", 0.1)
    with somebody_elses_lab(), pytest.raises(LabError, match=r"already running .*a test has waited 0.1 s for its turn"):
        lab_workers(cluster, jobs.talk).start()
