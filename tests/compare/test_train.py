"""The script that trains the settings: how long, and what it records."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import record, tasks
from paceline.compare import read_trial
from paceline.compare.train import train
from paceline.errors import SettingError
from paceline.events import Ended, Measured


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_by_the_clock_evaluations_do_not_count(tmp_path: Path) -> None:
    task = tasks.load("digits")
    train(task, "all-reduce", seed=0, epochs=None, seconds=0.5, folder=tmp_path)
    events = list(record.read(tmp_path / "events.jsonl"))
    (end,) = [event for event in events if isinstance(event, Ended)]
    measured = [event for event in events if isinstance(event, Measured)]
    assert end.reason == "stopped"
    assert measured[-1].step == end.step  # the last model is evaluated, wherever the clock has ended the run
    assert [event.step for event in measured[:-1]] == [23 * at for at in range(1, len(measured))]
    still = sum(event.values.get("evaluation_seconds", 0.0) for event in measured)
    summary, found = record.summary(events), read_trial(tmp_path, "one")
    assert found.seconds == pytest.approx(summary.seconds - still, abs=0.05)
    assert 0.4 < found.seconds < 5.0  # a step or two more than half a second; the machine may be busy
    assert found.examples == end.examples


def test_by_epochs_every_seed_has_weights_of_its_own(tmp_path: Path) -> None:
    task, losses = tasks.load("digits"), []
    for seed in (0, 1):
        train(task, "local-sgd", seed=seed, epochs=1, seconds=None, folder=tmp_path / str(seed))
        events = list(record.read(tmp_path / str(seed) / "events.jsonl"))
        losses.append([event.values["test_loss"] for event in events if isinstance(event, Measured)])
    assert [len(each) for each in losses] == [1, 1]
    assert losses[0] != losses[1]


def test_a_setting_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="unknown setting: 'gosip'; did you mean 'gossip'"):
        train(tasks.load("digits"), "gosip", seed=0, epochs=1, seconds=None, folder=tmp_path)
