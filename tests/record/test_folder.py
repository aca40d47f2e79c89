from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from paceline import record

from .fake import one_of_each


def test_everything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorders = record.folder(tmp_path / "run")
    events = one_of_each()
    for event in events:
        for recorder in recorders:
            recorder.record(event)
    for recorder in recorders:
        recorder.close()
    assert list(record.read(tmp_path / "run" / "events.jsonl")) == events
    assert json.loads((tmp_path / "run" / "trace.json").read_text())
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert "done: 1 steps, 64 examples" in capsys.readouterr().err


def test_without_a_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [type(recorder) for recorder in record.folder(tmp_path, shown=False)]
    assert kinds == [record.JsonLines, record.Trace, record.TensorBoard]
    assert capsys.readouterr().err == ""


def test_without_tensorboard_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name == "tensorboard" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    kinds = [type(recorder) for recorder in record.folder(tmp_path)]
    assert kinds == [record.JsonLines, record.Trace, record.Console]
    assert capsys.readouterr().err == "no TensorBoard files: for them, run: pip install 'paceline[tensorboard]'\n"
