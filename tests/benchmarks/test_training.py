"""The benchmarks of accuracy: each of their methods can be trained, and what is told of it is what happened."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks import accuracy, adaptive, adaptive_local, adascale, bench, training
from paceline import tasks

OPTIONS: dict[str, Any] = {
    "task": "digits",
    "model": "mlp",
    "epochs": 1,
    "batch": 64,
    **adaptive.SETTINGS,
    "decay": 0.0,
    "limit": 256,
    "target": 0.1,
    "look": 64,
}


@pytest.mark.parametrize(
    ("make", "method"),
    [
        *((accuracy.make, method) for method in accuracy.METHODS),
        *((adaptive.make, method) for method in adaptive.METHODS),
        *((adaptive_local.make, method) for method in adaptive_local.METHODS),
        *((adascale.make, method) for method in adascale.METHODS),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__module__.rpartition(".")[2],
)
def test_every_method_has_its_roles(make: training.Make, method: str) -> None:
    roles = make(method, {**OPTIONS, "total": 256}, tasks.load("digits").model("mlp", seed=0))
    assert roles.optimizer.param_groups
    assert roles.micro is None or roles.micro > 0


@pytest.mark.parametrize("method", ["small", "adaptive, whole gradient"])
def test_one_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(adaptive_local, "SMALL", 32)

    def in_pieces(name: str, options: dict[str, Any], model: nn.Module) -> training.Roles:
        return adaptive_local.make(name, options, model)._replace(micro=8)  # there is one worker only

    training.train(in_pieces, method, OPTIONS, 0, str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert 0 < found["steps"] <= 8
    assert found["rounds"] >= 1
    assert 0 <= found["accuracy"] <= 1  # so few steps need not teach anything
    assert found["last_batch"] >= 32
    assert found["rounds"] < found["steps"]


def test_a_training_that_diverges_is_a_result(tmp_path: Path) -> None:
    options = {**OPTIONS, "lr": 1e12, "epochs": 4}
    training.train(accuracy.make, "all-reduce", options, 0, str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["diverged"]
    assert 0 < found["steps"] < 16
    assert 0 <= found["accuracy"] <= 1
    assert "1 of 1 diverged" in training._line("this", [found], "this", [found])


@pytest.mark.slow  # a benchmark from end to end
def test_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--task digits --model mlp --epochs 1 --workers 2 --seeds 1 --limit 256 --lr 0.1"
    methods = ["--method", "all-reduce", "--method", "H = 4"]
    monkeypatch.setattr(sys, "argv", ["accuracy.py", *arguments.split(), *methods])
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "bench.py"))
    training.compare("accuracy", accuracy.__doc__, accuracy.make, list(accuracy.METHODS), accuracy.USUAL)
    told = capsys.readouterr().out
    assert "H = 4" in told
    assert "against all-reduce" in told
    last = json.loads(told.splitlines()[-1])
    found = last["results"]["methods"]
    assert [len(found[name]) for name in ("all-reduce", "H = 4")] == [1, 1]
    assert found["all-reduce"][0]["steps"] == found["H = 4"][0]["steps"] == 2
    assert found["H = 4"][0]["rounds"] == 1
    # Again with one method more: what was trained is not trained again, and one worker is enough for some.
    monkeypatch.setattr(sys, "argv", ["accuracy.py", *arguments.split(), *methods, "--method", "H = 16"])
    before, trained = found, []
    launch = bench.launch
    monkeypatch.setattr(bench, "launch", lambda *given: trained.append((given[0], given[3])) or launch(*given))  # type: ignore[func-returns-value]
    training.compare("accuracy", accuracy.__doc__, accuracy.make, list(accuracy.METHODS), alone=["H = 16"])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert trained == [(1, "H = 16")]
    assert {name: last["results"]["methods"][name] for name in before} == before
    assert json.loads((tmp_path / "results" / "accuracy-digits.json").read_text()) == last
