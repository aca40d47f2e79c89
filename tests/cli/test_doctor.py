"""``paceline doctor``."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from paceline import tasks
from paceline.cli import app
from paceline.errors import FleetError


def test_the_table_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    found = CliRunner().invoke(app, ["doctor"])
    rows = {line.split("  ")[0].strip(): line for line in found.stdout.splitlines()}
    for name in ("Python", "torch", "cores", "memory", "GPUs", "disk", "scikit-learn", "NCCL", "lab"):
        assert name in rows
    for task in tasks.names():
        assert f"data: {task}" in rows
    assert " ok " in rows["gloo"]
    assert " ok " in rows["all-reduce"]
    assert rows["all-reduce"].rstrip().endswith(" ms")
    assert found.exit_code == 0


def test_a_machine_that_cannot_exchange_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> float:
        raise FleetError("no answer within 60 s")

    monkeypatch.setattr("paceline.cli.checks.all_reduce_seconds", broken)
    found = CliRunner().invoke(app, ["doctor"])
    assert found.exit_code == 1
    assert "no answer within 60 s" in found.stdout
    assert "Training cannot work here: see all-reduce" in found.stdout


def test_data_files_are_found_and_missing_ones_explained(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("data")
    (folder / "tinyshakespeare.txt").touch()
    monkeypatch.setenv("PACELINE_DATA", str(folder))
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr("paceline.cli.checks.all_reduce_seconds", lambda: 0.001)
    lines = CliRunner().invoke(app, ["doctor"]).stdout.splitlines()
    (shakespeare,) = (line for line in lines if "data: tinyshakespeare" in line)
    (cifar,) = (line for line in lines if "data: cifar10" in line)
    assert " ok " in shakespeare
    assert str(folder) in shakespeare
    assert " missing " in cifar
    assert "PACELINE_DATA" in cifar
