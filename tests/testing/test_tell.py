"""The worker's side, without a harness, or with one that has gone."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from torch import nn

from paceline import Fleet
from paceline.errors import PacelineError
from paceline.testing import reached, tell, tell_digest


def test_without_a_harness_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tell.VARIABLE, raising=False)
    reached(7)
    tell_digest(nn.Linear(1, 1))
    fleet = Fleet.join()
    fleet.doing(7, "computing")
    fleet.close()


def test_a_harness_that_has_gone_is_an_error_at_the_stops_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(tell.VARIABLE, tell.describe(str(tmp_path / "desk"), 3, [(7, "computing")]))
    reached(6)
    reached(7, "updating")
    with pytest.raises(PacelineError, match="worker 3 cannot reach the test that has started it"):
        reached(7)


@pytest.mark.parametrize(
    ("patience", "says"), [(0.1, r"no answer within 0.1 s; call group\.wait"), (60.0, "started worker 3 has ended")]
)
def test_a_harness_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, patience: float, says: str
) -> None:
    monkeypatch.setattr(tell, "SECONDS", patience)
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    monkeypatch.setenv(tell.VARIABLE, tell.describe("desk", 3, [(7, "computing")]))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as desk, ThreadPoolExecutor() as threads:
        desk.bind("desk")
        desk.listen()
        waiting = threads.submit(reached, 7)
        caller, _ = desk.accept()
        with caller:
            assert b'"worker": 3, "step": 7' in caller.recv(1000)
            if patience < 1:
                wait([waiting])
        with pytest.raises(PacelineError, match=says):
            waiting.result()
