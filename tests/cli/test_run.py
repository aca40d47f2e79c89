"""``paceline run`` as a process of its own, and the signals that it gets."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from tests.cli.processes import LIMIT, alive, paceline, pids, script, stopped_twice, until

TRAINING = """
import torch, torch.nn.functional as F
import paceline as pl
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.int64))
with pl.Run(model, optimizer, data, batch=8, checkpoint=pl.Checkpoint(here / "checkpoints", every=10**9)) as run:
    for step in run.steps(steps=10**9):
        optimizer.zero_grad()
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        time.sleep(0.01)
        (here / f"trains-{rank}").touch()
"""


def test_ctrl_c_ends_training_after_a_step_with_a_checkpoint(tmp_path: Path) -> None:
    process = paceline("run", "-w", "2", script(tmp_path, TRAINING), cwd=tmp_path)
    until(lambda: len(list(tmp_path.glob("trains-*"))) == 2 or process.poll() is not None, "training")
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert "stopping all workers (SIGINT)" in told
    assert "Traceback" not in told
    assert len(list((tmp_path / "checkpoints").glob("*.ckpt"))) == 1
    assert len(pids(tmp_path)) == 2
    assert not any(map(alive, pids(tmp_path)))


def test_a_second_ctrl_c_ends_workers_that_do_not_listen(tmp_path: Path) -> None:
    told = stopped_twice("run", "-w", "2", folder=tmp_path)
    assert "Traceback" not in told
    assert len(pids(tmp_path)) == 2
    assert not any(map(alive, pids(tmp_path)))


def test_workers_end_with_a_killed_launcher(tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(here / f"ready-{rank}").touch()
os.kill(os.getpid(), signal.SIGSTOP)
"""
    process = paceline("run", "-w", "2", script(tmp_path, body), cwd=tmp_path)
    until(lambda: len(list(tmp_path.glob("ready-*"))) == 2 or process.poll() is not None, "the workers")
    process.kill()
    process.communicate(timeout=LIMIT)
    assert len(pids(tmp_path)) == 2
    until(lambda: not any(map(alive, pids(tmp_path))), "the end of the workers")


def test_a_script_that_is_not_there() -> None:
    found = CliRunner().invoke(app, ["run", "nowhere.py"])
    assert found.exit_code == 2
    assert "there is no script nowhere.py" in found.stderr


@pytest.mark.parametrize("option", [["--workers", "3"], ["-w3"], ["--independent"], ["--at=1.2.3.4:5"]])
def test_an_option_behind_the_script_is_the_scripts_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    launched: list[list[str]] = []

    def launch(command: list[str], **settings: object) -> int:
        launched.append(command)
        return 0

    for name in ("launch", "launch_independent"):
        monkeypatch.setattr(sys.modules["paceline.cli.run"], name, launch)
    script = tmp_path / "train.py"
    script.touch()
    found = CliRunner().invoke(app, ["run", str(script), *option])
    assert f"{option[0]} is behind {script}, so the script gets it" in " ".join(found.stderr.split())
    assert launched == [[str(script), *option]]
    all_given = ["-w", "2", "--independent", "--at", "1.2.3.4:5", "--nodes", "2"]
    assert "is behind" not in CliRunner().invoke(app, ["run", *all_given, str(script), *option]).stderr


def test_version_and_help() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("paceline 0.")
    told = CliRunner().invoke(app, ["--help"]).stdout
    assert all(command in told for command in ("run", "demo", "doctor"))
    assert "--node-rank" in CliRunner().invoke(app, ["run", "--help"]).stdout
