"""Workers that are started again alone: in the process of the test, and as a command with a real training."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app, independent
from paceline.cli.independent import launch_independent, pause
from paceline.cli.launch import Machines
from paceline.errors import SettingError
from tests.cli.processes import LIMIT, alive, paceline, pids, script, stopped_twice, until
from tests.pool import free_port

# Counts the starts of this worker.
COUNT = """
starts = len(list(here.glob(f"start-{rank}-*")))
(here / f"start-{rank}-{starts}").touch()
"""


def launch(command: list[str], *, workers: int, restarts: int = 3, machines: Machines = Machines()) -> int:  # noqa: B008
    return launch_independent(command, workers=workers, machines=machines, restarts=restarts, invitation=None)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(independent, "FIRST_PAUSE", 0.01)


def test_pauses_double_up_to_a_minute_and_begin_anew_after_a_long_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(independent, "FIRST_PAUSE", 1.0)
    pauses: list[float] = []
    for _ in range(8):
        pauses.append(pause(pauses[-1] if pauses else None, lived=5.0))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert pause(60.0, lived=61.0) == 1


def test_who_fails_is_started_again_and_nobody_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = (
        COUNT
        + """
while rank == 0 and len(list(here.glob("start-1-*"))) < 3:
    time.sleep(0.01)
if rank == 1 and starts == 0:
    sys.exit(5)
if rank == 1 and starts == 1:
    os.kill(os.getpid(), signal.SIGKILL)
env = os.environ
print(rank, starts, env["WORLD_SIZE"], env["LOCAL_RANK"], env["MASTER_PORT"].isdigit(), sys.argv[1:])
"""
    )
    assert launch([script(tmp_path, body), "--lr", "0.1"], workers=2) == 0
    told = capfd.readouterr()
    assert sorted(told.out.splitlines()) == ["0 0 2 0 True ['--lr', '0.1']", "1 2 2 1 True ['--lr', '0.1']"]
    lines = told.err.splitlines()
    assert "rank 1 ended with exit code 5; starting it again in 0.01 s (1 of 3)" in lines[0]
    assert "rank 1 killed by SIGKILL" in lines[1]
    assert "starting it again in 0.02 s (2 of 3)" in lines[1]
    assert len(lines) == 2


def test_who_fails_too_often_is_given_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = COUNT + "raise ArithmeticError('a bad number')"
    assert launch([script(tmp_path, body)], workers=2, restarts=2) == 1
    assert sorted(path.name for path in tmp_path.glob("start-*")) == [
        f"start-{r}-{n}" for r in (0, 1) for n in range(3)
    ]
    told = capfd.readouterr().err
    assert told.count("ArithmeticError: a bad number") == 6
    assert told.count("it is given up after 3 starts, and the others go on") == 2


def test_who_fails_when_others_are_done_is_not_started_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = (
        COUNT
        + """
meet(2)
if rank == 1:
    other = int((here / "pid-0").read_text())
    while os.path.exists(f"/proc/{other}"):
        time.sleep(0.01)
    time.sleep(0.5)  # the launcher sees it
    sys.exit(4)
"""
    )
    assert launch([script(tmp_path, body)], workers=2) == 0
    assert "rank 1 ended with exit code 4; others have come to the end" in capfd.readouterr().err
    assert len(list(tmp_path.glob("start-1-*"))) == 1


def test_who_waits_when_others_come_to_the_end_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(independent, "FIRST_PAUSE", 3600.0)  # a launcher that goes on to wait is a hang
    body = (
        COUNT
        + """
meet(2)
if rank == 1:
    sys.exit(4)
other = int((here / "pid-1").read_text())
while os.path.exists(f"/proc/{other}"):
    time.sleep(0.01)
time.sleep(0.5)  # the launcher sees it, and waits
"""
    )
    assert launch([script(tmp_path, body)], workers=2) == 0
    told = capfd.readouterr().err.splitlines()
    assert "rank 1 ended with exit code 4; starting it again in 3600 s (1 of 3)" in told[0]
    assert "rank 1 waited to be started again; others have come to the end, so that it is not" in told[1]
    assert len(told) == 2
    assert len(list(tmp_path.glob("start-1-*"))) == 1


def test_who_was_told_to_stop_is_not_started_again(tmp_path: Path) -> None:
    body = COUNT + "sys.exit(143)"
    assert launch([script(tmp_path, body)], workers=1) == 143
    assert len(list(tmp_path.glob("start-*"))) == 1


def test_ranks_count_through_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of another launcher")
    body = "print(rank, *(os.environ.get(f'{name}') for name in "
    body += "('WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', 'PACELINE_INVITATION', 'TORCHELASTIC_RUN_ID')))"
    code = launch_independent(
        [script(tmp_path, body)],
        workers=2,
        machines=Machines(3, 1, "10.0.0.7:29500"),
        restarts=0,
        invitation=tmp_path / "invitation",
    )
    assert code == 0
    place = f"6 10.0.0.7 29500 {tmp_path / 'invitation'} None"
    assert sorted(capfd.readouterr().out.splitlines()) == [f"2 {place}", f"3 {place}"]


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"--workers \(0\) must be at least 1"):
        launch(["x"], workers=0)
    with pytest.raises(SettingError, match=r"--restarts \(-1\) must be at least 0"):
        launch(["x"], workers=1, restarts=-1)
    with pytest.raises(SettingError, match=r"several machines needs --invitation FILE"):
        launch(["x"], workers=1, machines=Machines(2, 0, "10.0.0.7:29500"))
    path = script(tmp_path, "")
    found = CliRunner().invoke(app, ["run", "--invitation", "file", path])
    assert found.exit_code == 2
    assert "--invitation (file) has no effect without --independent" in found.stderr


def test_a_signal_stops_all_and_a_second_at_once(tmp_path: Path) -> None:
    told = stopped_twice("run", "--independent", "-w", "2", folder=tmp_path)
    assert "stopping all workers (SIGINT); Ctrl-C again stops at once" in told
    assert "starting it again" not in told
    assert not any(map(alive, pids(tmp_path)))


TRAINING = """
import torch, torch.nn.functional as F
import paceline as pl
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.int64))
saves, starts = here / "saves", len(list(here.glob(f"start-{rank}-*")))
(here / f"start-{rank}-{starts}").touch()
with pl.Run(
    model, optimizer, data, batch=8, sync=pl.sync.Gossip(2), checkpoint=pl.Checkpoint(saves, every=2), deadline=60
) as run:
    resumed = run.resume(saves, missing_ok=True)
    first = run.cursor.progress.step
    for step in run.steps(steps=10**9):
        optimizer.zero_grad()
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        time.sleep(0.01)
        if step.index == first + 10:
            (here / f"trains-{rank}-{starts}").write_text(f"{resumed} {first}")
        if (here / "enough").exists():
            run.stop()
    (here / f"digest-{rank}").write_text(run.replica.digest())
"""


@pytest.mark.slow
def test_ctrl_c_lets_every_worker_save_itself(tmp_path: Path) -> None:
    body = TRAINING.replace("every=2", "every=10**9")
    process = paceline("run", "--independent", "-w", "2", script(tmp_path, body), cwd=tmp_path)
    try:
        until(lambda: len(list(tmp_path.glob("trains-*"))) == 2 or process.poll() is not None, "training")
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert "starting it again" not in told
    for rank in (0, 1):
        assert len(list((tmp_path / "saves" / f"worker-{rank}").glob("step-*.ckpt"))) == 1, told


@pytest.mark.slow
def test_a_machine_that_is_started_again_finds_those_that_live(tmp_path: Path) -> None:
    """Machine 0, with the store that all have met at, is lost with all its processes; only its files are left."""
    path, at = script(tmp_path, TRAINING), f"127.0.0.1:{free_port()}"

    def machine(number: int) -> subprocess.Popen[str]:
        where = ["--nodes", "2", "--node-rank", str(number), "--at", at]
        own = ["--invitation", str(tmp_path / f"invitation-{number}")]
        return paceline("run", "--independent", "-w", "1", *where, *own, path, cwd=tmp_path)

    def wait(name: str) -> None:
        until(lambda: (tmp_path / name).exists() or any(each.poll() is not None for each in machines), name)

    machines = [machine(0), machine(1)]
    try:
        wait("trains-0-0")
        wait("trains-1-0")
        machines[0].kill()
        machines[0].communicate(timeout=LIMIT)
        until(lambda: not alive(int((tmp_path / "pid-0").read_text())), "the end of its worker")
        machines[0] = machine(0)
        wait("trains-0-1")
        (tmp_path / "enough").touch()
        told = [each.communicate(timeout=LIMIT)[0] for each in machines]
    finally:
        for each in machines:
            each.kill()
            each.communicate()
    assert [each.returncode for each in machines] == [0, 0], told
    assert (tmp_path / "trains-0-1").read_text().startswith("True")
    assert not (tmp_path / "start-1-1").exists()
    assert (tmp_path / "digest-0").read_text() == (tmp_path / "digest-1").read_text()
    assert not list(tmp_path.glob("invitation-*"))


@pytest.mark.parametrize(
    "killed", [pytest.param((1,), id="one of two"), pytest.param((0, 1), id="all", marks=pytest.mark.slow)]
)
def test_killed_workers_come_back_and_the_training_ends_well(tmp_path: Path, killed: tuple[int, ...]) -> None:
    """One comes back to the other with an invitation; where all have died, all begin again where they were."""
    process = paceline("run", "--independent", "-w", "2", script(tmp_path, TRAINING), cwd=tmp_path)

    def train(starts: dict[int, int]) -> None:
        files = [tmp_path / f"trains-{rank}-{start}" for rank, start in starts.items()]
        until(lambda: all(file.exists() for file in files) or process.poll() is not None, f"{files}")

    try:
        train({0: 0, 1: 0})
        for rank in killed:
            os.kill(int((tmp_path / f"pid-{rank}").read_text()), signal.SIGKILL)
        train(dict.fromkeys(killed, 1))
        (tmp_path / "enough").touch()
        told, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, told
    assert told.count("killed by SIGKILL") == len(killed), told
    for rank in killed:
        resumed, first = (tmp_path / f"trains-{rank}-1").read_text().split()
        assert resumed == "True"
        assert int(first) >= 10
    assert (tmp_path / "digest-0").read_text() == (tmp_path / "digest-1").read_text()
    assert not (tmp_path / "start-0-1").exists() or 0 in killed
