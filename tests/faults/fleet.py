"""Workers without a launcher, so that nobody but Paceline ends them."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from tests.pool import forks, free_port


class Fleet:
    """Running workers, and what they have written."""

    def __init__(self, processes: list[BaseProcess], folder: Path) -> None:
        self.processes, self._folder = processes, folder

    def said(self, rank: int) -> str:
        return (self._folder / f"rank-{rank}.log").read_text()

    def wait_for(self, rank: int, word: str, seconds: float) -> str:
        """The first line with this word that a worker writes."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in self.said(rank).splitlines():
                if word in line:
                    return line
            time.sleep(0.02)
        raise AssertionError(f"rank {rank} did not say {word!r} within {seconds} s, but:\n{self.said(rank)}")

    def end_of(self, rank: int, seconds: float) -> int:
        """The exit code of a worker that has to end by itself."""
        process = self.processes[rank]
        process.join(seconds)
        assert process.exitcode is not None, f"rank {rank} still runs after {seconds} s and said:\n{self.said(rank)}"
        return process.exitcode


@contextmanager
def fleet(workers: int, folder: Path, job: Callable[..., Any], *args: Any) -> Iterator[Fleet]:
    """Start workers that run ``job(*args)``; whatever is left of them at the end is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    processes: list[BaseProcess] = []
    for rank in range(workers):
        (folder / f"rank-{rank}.log").touch()
        process: BaseProcess = forks().Process(target=_begin, args=(rank, workers, port, folder, job, args))
        process.start()
        processes.append(process)
    try:
        yield Fleet(processes, folder)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _begin(rank: int, workers: int, port: int, folder: Path, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(workers), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of loader processes: as in a script of a user
    job(*args)
