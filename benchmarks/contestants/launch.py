"""Start one process for each worker, in the lab or plainly on this machine, and see how they end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.heap import keep_freed

__all__ = ["Outcome", "lab_failure", "run_workers", "tail"]

ROOT = Path(__file__).parents[2]
PARTING = 10.0  # seconds for the other workers when one has failed, and for the lab when it is told to stop
BUILDING = 60.0  # seconds for the lab to build its network, and to take it down


@dataclass(frozen=True)
class Outcome:
    """How the workers ended."""

    failure: str | None
    """Why they did not all end well."""
    workers: list[dict[str, Any]]
    """For each what ``lab.json`` says; None for what a launcher cannot know."""


def run_workers(
    cluster: str, workers: int, command: Sequence[str], folder: Path, limit: float, spare: int | None = None
) -> Outcome:
    """Run the command once for each worker of a cluster, with torchrun's variables, and kill what takes too long.

    ``local`` is no cluster: so many workers on this machine, over loopback. Everything else is for ``paceline lab``,
    and the number of workers is in its file. Output and records go to ``folder``, which must exist. How the worker of
    the rank ``spare`` ends is no failure.
    """
    if cluster == "local":
        return _run_locally(workers, command, folder, limit, spare)
    return _run_in_lab(cluster, command, folder, limit, spare)


def tail(path: Path, lines: int = 3) -> str:
    """The last lines of a file that are not empty."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join([line.strip() for line in text.splitlines() if line.strip()][-lines:])


def _run_in_lab(cluster: str, command: Sequence[str], folder: Path, limit: float, spare: int | None) -> Outcome:
    output = folder / "output.txt"
    options = ["--out", str(folder), "--limit", str(limit)]
    with output.open("w") as file:
        process = _start([sys.executable, "-m", "paceline", "lab", "run", cluster, *options, "--", *command], file, {})
        try:
            code = process.wait(limit + BUILDING)
        except subprocess.TimeoutExpired:
            return Outcome(f"the lab had not ended {BUILDING:g} s after its limit: {tail(output)}", [])
        finally:
            _stop_lab(process)
    report = folder / "lab.json"
    rows = json.loads(report.read_text())["workers"] if report.exists() else []
    return Outcome(lab_failure(code, rows, folder, limit, spare), rows)


def lab_failure(
    code: int, rows: Sequence[dict[str, Any]], folder: Path, limit: float, spare: int | None = None
) -> str | None:
    """The exit code and last words of the worker that failed first by itself, or else of the lab."""
    if code == 0:
        return None
    failed = [row for row in rows if row["exit"] and row["ended_by"] is None]
    mine = [row for row in failed if row["rank"] == spare]
    if mine and mine == failed and not any(row["ended_by"] for row in rows):
        return None
    failed = [row for row in failed if row not in mine]
    if not failed:
        return _late(limit) if rows else f"exit {code}: {tail(folder / 'output.txt')}"
    first = min(failed, key=lambda row: row["started"] + row["wall_seconds"])
    return f"exit {first['exit']}: {tail(folder / (first['name'] + '.log'))}"


def _stop_lab(process: subprocess.Popen[bytes]) -> None:
    """End a lab that still runs, in order: at the second signal it kills its workers, and takes its network down."""
    for _ in range(2):
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(PARTING / 2)
    _kill(process)


def _run_locally(workers: int, command: Sequence[str], folder: Path, limit: float, spare: int | None) -> Outcome:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    shared = {
        "WORLD_SIZE": workers,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": max(1, (os.cpu_count() or 1) // workers),
    }
    began = time.monotonic()
    running: dict[int, subprocess.Popen[bytes]] = {}
    rows: dict[int, dict[str, Any]] = {}
    failure, end = None, began + limit
    try:
        for rank in range(workers):
            with (folder / f"output-{rank}.txt").open("w") as file:
                running[rank] = _start(command, file, {**shared, "RANK": rank})
        while len(rows) < workers and time.monotonic() < end:
            time.sleep(0.02)
            for rank in [rank for rank in running if rank not in rows]:
                pid, status, usage = os.wait4(running[rank].pid, os.WNOHANG)
                if pid:
                    code = running[rank].returncode = os.waitstatus_to_exitcode(status)
                    rows[rank] = _row(rank, code, time.monotonic() - began, usage.ru_utime + usage.ru_stime)
                    if code and failure is None and rank != spare:
                        failure = f"exit {code}: {tail(folder / f'output-{rank}.txt')}"
                        end = min(end, time.monotonic() + PARTING)
    finally:
        for process in running.values():
            _kill(process)
    if len(rows) < workers and failure is None:
        failure = _late(limit)
    return Outcome(failure, [rows[rank] for rank in sorted(rows)])


def _row(rank: int, code: int, wall: float, cpu: float) -> dict[str, Any]:
    known = {"name": f"local-{rank}", "rank": rank, "exit": code, "wall_seconds": wall, "cpu_seconds": cpu}
    unknown = ("throttled_seconds", "waiting_seconds", "bytes_sent", "bytes_received")
    return {**known, **dict.fromkeys(unknown)}


def _late(limit: float) -> str:
    return f"killed: it had not ended after {limit:.0f} s"


def _start(command: Sequence[str], output: IO[str], variables: dict[str, object]) -> subprocess.Popen[bytes]:
    # Modules come from the repository, and never from the folder that somebody happens to be in.
    where = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    told = {name: str(value) for name, value in variables.items()}
    environment = {**os.environ, **keep_freed(os.environ), **where, **told}
    # A session of its own, so that all it has started can be ended with it.
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process, if it runs, and what it may have left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
