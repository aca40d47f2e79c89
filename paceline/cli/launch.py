"""Start the workers of this machine, wait for them, and leave none behind: torchrun's launcher, with less patience."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline.cli import worker
from paceline.cli.endings import SIGNALS, prompt_endings, usual_signals
from paceline.cli.failures import cause, explain, failures, shell_code
from paceline.cli.speak import say
from paceline.errors import FleetError, SettingError
from paceline.heap import keep_freed

__all__ = ["Machines", "cores", "default_workers", "environment", "launch", "spare_gpus"]

# A run that is done or was told to stop is not started again.
FINAL = {0, *(128 + number for number in SIGNALS)}


@dataclass(frozen=True)
class Machines:
    """The machines of a run, and which of them this is."""

    count: int = 1
    rank: int = 0
    at: str | None = None
    """``HOST:PORT`` of the first machine, where all of them meet."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise SettingError(f"--nodes ({self.count}) must be at least 1 machine")
        if not 0 <= self.rank < self.count:
            raise SettingError(
                f"--node-rank ({self.rank}) must be from 0 to {self.count - 1}: every one of the {self.count} machines "
                "has its own"
            )
        if self.count == 1:
            if self.at:
                raise SettingError(f"--at ({self.at}) has no effect with one machine; leave it out, or give --nodes")
            return
        host, _, port = (self.at or "").rpartition(":")
        if not host or not port.isdigit():
            given = f"--at ({self.at})" if self.at else "--at, which is not given,"
            raise SettingError(f"{given} must be HOST:PORT of the first machine, such as --at 10.0.0.1:29500")


ONE = Machines()


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(workers: int) -> dict[str, str]:
    """This process's, and what workers on this machine need unless it is there already."""
    return {"OMP_NUM_THREADS": str(max(1, cores() // workers)), **keep_freed(os.environ), **os.environ}


def default_workers() -> int:
    """One for each GPU; without any, one for each core."""
    return torch.cuda.device_count() if torch.cuda.is_available() else cores()


def spare_gpus(workers: int) -> None:
    """Hide the GPUs of this machine if there are some, but not one for each worker."""
    if 0 < torch.cuda.device_count() < workers:
        say(f"{workers} workers, but {torch.cuda.device_count()} GPU: training on the CPU")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def launch(command: Sequence[str], *, workers: int, machines: Machines = ONE, restarts: int = 0) -> int:
    """Run ``script.py ARGS…`` or ``-m module ARGS…`` in every worker; gives the exit code for the shell.

    That is the code of the worker that failed first, or 128 and the number of the signal that ended the run.
    """
    if workers < 1:
        raise SettingError(f"--workers ({workers}) must be at least 1")
    if restarts < 0:
        raise SettingError(f"--restarts ({restarts}) must be at least 0")
    if restarts and machines.count > 1:
        raise SettingError(
            f"--restarts ({restarts}) works on one machine only, not with --nodes ({machines.count}); start the "
            "command again on all machines instead: a script that calls run.resume goes on"
        )
    os.environ.update(environment(workers))
    if "LOGLEVEL" not in os.environ:  # torch's own switch for the log of its launcher
        log = logging.getLogger("torch.distributed.elastic")
        log.addHandler(logging.NullHandler())
        log.propagate = False
    if machines.count > 1:
        say(f"machine {machines.rank} of {machines.count}, meeting the others at {machines.at}")
    with usual_signals():
        try:
            for attempt in range(1, restarts + 1):
                code = _attempt(command, workers, machines)
                if code in FINAL:
                    return code
                say(f"starting all workers again ({attempt} of {restarts})")
            return _attempt(command, workers, machines)
        except SignalException as stop:
            return 128 + int(stop.sigval)


def _attempt(command: Sequence[str], workers: int, machines: Machines) -> int:
    # Every attempt has a launcher and a store of its own: with torch's max_restarts, the workers of the next one may
    # find addresses in the store that those of the last left, and hang (pytorch issue 135712).
    ended: set[int] = set()
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder, prompt_endings(ended):
        agent = elastic_launch(_config(folder, workers, machines), sys.executable)
        try:
            agent(worker.__file__, *command)
        except ChildFailedError as error:
            found = failures(error.failures, ended)
            for line in explain(found):
                say(line, "red")
            return shell_code(cause(found).code)
        except (RendezvousError, RuntimeError, TimeoutError) as error:
            raise FleetError(f"the workers could not be started: {error}") from error
    return 0


def _config(folder: str, workers: int, machines: Machines) -> LaunchConfig:
    # On one machine nothing must depend on its host name, which may not be known to any name server.
    meeting: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "127.0.0.1"}
    if machines.count > 1:
        # Static, so that rank 0, which writes records and checkpoints, is on machine 0.
        meeting = {"rdzv_backend": "static", "rdzv_endpoint": machines.at, "rdzv_configs": {"rank": machines.rank}}
    return LaunchConfig(
        min_nodes=machines.count,
        max_nodes=machines.count,
        nproc_per_node=workers,
        run_id="paceline" if machines.count > 1 else uuid.uuid4().hex,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        **meeting,
    )
