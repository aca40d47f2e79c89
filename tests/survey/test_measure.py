"""Measuring, by real workers."""

from __future__ import annotations

import json
import os
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from paceline import survey
from paceline.cli import app
from paceline.errors import SettingError
from paceline.survey.measure import pairings
from tests.cli.processes import LIMIT, paceline
from tests.pool import Pool, RemoteError
from tests.problems import data, mlp


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def measured(batch: int = 8) -> tuple[survey.Survey, bool]:
    """What is found, and whether the model is as it was."""
    model = mlp()
    before = [each.detach().clone() for each in model.parameters()]
    found = survey.measure(model, loss, data(40), batch=batch, seconds=0.2, deadline=30.0)
    return found, all(map(torch.equal, before, model.parameters()))


def test_all_workers_find_the_same_and_leave_the_model_alone(pool: Pool) -> None:
    (one, kept), *others = pool.run(3, measured)
    assert kept
    assert all(other == (one, True) for other in others)
    assert [[size for size, _ in points] for points in one.steps] == [[2, 3, 6]] * 3
    assert [(link.one, link.other) for link in one.links] == [(0, 1), (0, 2), (1, 2)]
    assert min(link.bytes_per_second for link in one.links) > 0
    assert one.sum_seconds > 0
    assert one.coded_seconds > 0
    assert one.model_bytes == 4 * sum(each.numel() for each in mlp().parameters())
    assert (one.examples, one.batch) == (40, 8)


def test_one_worker_has_nobody_to_sum_with() -> None:
    found, kept = measured()
    assert kept
    assert (found.sum_seconds, found.coded_seconds, found.links) == (0.0, 0.0, [])
    assert survey.recommend(survey.forecasts(found)).name == "all-reduce"


@pytest.mark.parametrize("workers", range(1, 9))
def test_every_two_meet_once(workers: int) -> None:
    met = []
    for partners in pairings(workers):
        assert all(partners[partners[rank]] == rank for rank in range(workers))
        met += [(rank, other) for rank, other in enumerate(partners) if rank < other]
    assert sorted(met) == list(combinations(range(workers), 2))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"batch": 41}, r"batch \(41\) must be from one example for each of the 1 workers to the 40 of the data set"),
        ({"batch": 0}, r"batch \(0\) must be from one example"),
        ({"batch": 8, "seconds": 0.0}, r"seconds \(0\.0\) must be above zero"),
        ({"batch": 8, "seconds": float("inf")}, r"seconds \(inf\) must be above zero, and finite"),
    ],
)
def test_bad_settings(how: dict[str, float], says: str) -> None:
    with pytest.raises(SettingError, match=says):
        survey.measure(mlp(), loss, data(40), **how)  # type: ignore[arg-type]


def test_a_model_without_parameters() -> None:
    with pytest.raises(SettingError, match="nothing to train"):
        survey.measure(nn.Identity(), loss, data(40), batch=8)


def test_complex_parameters() -> None:
    with pytest.raises(SettingError, match="complex parameters"):
        survey.measure(nn.Linear(2, 2, dtype=torch.complex64), loss, data(40), batch=8)


def disagrees() -> None:
    rank = int(os.environ["RANK"])
    survey.measure(mlp(), loss, data(40), batch=8, seconds=0.1 + rank, deadline=30.0)


def test_all_measure_for_the_same_time(pool: Pool) -> None:
    for outcome in pool.outcomes(2, disagrees):
        assert isinstance(outcome, RemoteError)
        assert "seconds to measure" in outcome.text


def test_a_file_that_cannot_be_written_is_told_before(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["probe", "-w", "1", "--out", str(tmp_path / "missing" / "found.json")])
    assert found.exit_code != 0
    assert "cannot be written: No such file or directory" in " ".join(found.output.split())


def test_the_command_recommends_a_method(tmp_path: Path) -> None:
    process = paceline("probe", "-w", "2", "--seconds", "1", "--out", "found.json", cwd=tmp_path)
    told, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, told
    found = json.loads((tmp_path / "found.json").read_text())
    assert f"Take {found['recommended']}: " in told
    assert next(each["name"] for each in found["forecasts"]) == "all-reduce"
    assert len(found["survey"]["speeds"]) == 2


def test_what_has_no_effect_is_refused() -> None:
    found = CliRunner().invoke(app, ["probe", "--cluster", "slow", "-w", "3"])
    assert found.exit_code != 0
    assert "--workers (3) has no effect with --cluster" in found.output
