"""Workers that a launcher starts again, maybe fewer of them, find each other and go on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import paceline as pl
from tests.pool import Pool, RemoteError, free_port
from tests.problems import data, mlp, train

ROOT = Path(__file__).parents[2]
LIMIT = 120.0  # seconds: a hang is a failed test, not a stuck suite


def train_on(port: int, late: int, deadline: float = 60) -> str:
    """Meet at a store that a launcher hosts, as its variables say; one worker comes later than the others."""
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", str(port))
        patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        time.sleep(0.5 if rank == late else 0.0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.Run(model, optimizer, data(60), batch=12, deadline=deadline, sync=pl.sync.LocalSGD(2)) as run:
            train(run, model, steps=4)
            return run.replica.digest()


def test_workers_that_are_started_again_on_the_same_store(pool: Pool) -> None:
    """It still holds the addresses of those before, which nobody listens to any more."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    digests = [
        digest
        for late, size in ((0, 3), (1, 3), (0, 2), (2, 3))
        for digest in pool.run(size, train_on, store.port, late)
    ]
    assert len(digests) == 11
    assert len(set(digests)) == 2  # three workers end alike in each start, and so do two


def alone(port: int) -> None:
    if os.environ["RANK"] == "0":
        train_on(port, late=-1, deadline=1)


def test_a_worker_that_does_not_come_is_named(pool: Pool) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, _ = pool.outcomes(2, alone, store.port)
    assert isinstance(first, RemoteError)
    assert first.kind == "WorkerLost"
    assert first.text == "rank 0 waited 1 s for all workers to start: ranks [1] did not come"


SCRIPT = """
import sys, time
import torch
import paceline as pl
from tests.problems import data, mlp, train

torch.set_num_threads(1)
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
saves = pl.Checkpoint(sys.argv[1], every=4)
with pl.Run(model, optimizer, data(600), batch=12, deadline=10, sync=pl.sync.LocalSGD(4), checkpoint=saves) as run:
    run.resume(sys.argv[1], missing_ok=True)
    print(f"rank {run.fleet.rank} of {run.fleet.size} begins with step {run.progress.step}", flush=True)
    train(run, model, each=lambda step: time.sleep(0.05), steps=100)
    print(f"rank {run.fleet.rank} of {run.fleet.size} ends with {run.replica.digest()}", flush=True)
"""


@contextmanager
def launcher(folder: Path, name: str, port: int, *, is_host: bool) -> Iterator[tuple[psutil.Popen, Path]]:
    """One of two machines, as torchrun sees it."""
    # Torch waits half a minute for more machines to come, and a quarter of one for those that are gone.
    patience = f"is_host={is_host:d},last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=2"
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=test", f"--rdzv-conf={patience}"]
    size = ["--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3"]
    log = folder / f"{name}.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "torch.distributed.run", *size, *meeting, str(folder / "train.py")]
    with log.open("w") as out:
        process = psutil.Popen([*command, str(folder / "saves")], stdout=out, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process, log
    finally:
        kill(process)


def kill(process: psutil.Popen) -> None:
    """With all its workers."""
    if process.is_running():
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("goes", [0, 1], ids=["with rank 0", "without rank 0"])
def test_a_machine_is_lost_and_the_other_goes_on(tmp_path: Path, goes: int) -> None:
    """From the last checkpoint, with the workers that are left. The store where machines meet is on the one that stays.

    Rank 0 is on the one that was started first.
    """
    (tmp_path / "train.py").write_text(SCRIPT)
    port = free_port()
    with (
        launcher(tmp_path, "first", port, is_host=goes == 1) as first,
        launcher(tmp_path, "second", port, is_host=goes == 0) as second,
    ):
        logs = [log for _, log in (first, second)]
        end = time.monotonic() + LIMIT
        while len(list((tmp_path / "saves").glob("*.ckpt"))) < 2:
            assert time.monotonic() < end, "".join(log.read_text() for log in logs)
            time.sleep(0.05)
        assert [bool(re.search("rank 0 of 4 begins with step 0", log.read_text())) for log in logs] == [True, False]
        kill((first, second)[goes][0])
        code = (first, second)[1 - goes][0].wait(LIMIT)
    text = logs[1 - goes].read_text()
    assert code == 0, text
    begins = re.findall(r"rank [01] of 2 begins with step (\d+)", text)
    assert len(begins) == 2
    assert begins[0] == begins[1]
    assert int(begins[0]) >= 8
    assert int(begins[0]) % 4 == 0
    digests = re.findall(r"rank [01] of 2 ends with (\w+)", text)
    assert len(digests) == 2
    assert digests[0] == digests[1]
