"""Worker processes that stay alive between tests: starting one costs seconds, a job in a live one milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

LIMIT = 120.0  # seconds for one job: a hang is a failed test, not a stuck suite


class RemoteError(Exception):
    """What a worker raised, with its traceback as text."""

    def __init__(self, kind: str, text: str, trace: str) -> None:
        super().__init__(kind, text, trace)
        self.kind, self.text, self.trace = kind, text, trace

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}\n{self.trace}"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def forks() -> multiprocessing.context.ForkServerContext:
    """Processes that begin with torch already imported: forked from a server that has done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


class Pool:
    """Runs a function on any number of workers, each with torchrun's environment, and gives their results by rank."""

    def __init__(self) -> None:
        self._context = forks()
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection[Any, Any]]] = []

    def run(self, size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """The results; the first worker's exception is raised as a :class:`RemoteError`."""
        outcomes = self.outcomes(size, job, *args)
        for outcome in outcomes:
            if isinstance(outcome, RemoteError):
                raise outcome
        return outcomes

    def outcomes(self, size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """The results or :class:`RemoteError` s, by rank."""
        while len(self._workers) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=False)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        port = free_port()
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            pipe.send((rank, size, port, job, args))
        found: list[Any] = []
        for _, pipe in self._workers[:size]:
            try:
                if not pipe.poll(LIMIT):
                    raise TimeoutError(f"a worker did not answer within {LIMIT} s")
                found.append(pipe.recv())
            except (EOFError, TimeoutError):
                self.close()
                raise
        return found

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []


def _serve(pipe: Connection[Any, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of loader processes: as in a script of a user
    while True:
        try:
            rank, size, port, job, args = pipe.recv()
        except (EOFError, OSError):
            return
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                # Many jobs have BatchNorm and unequal shares on purpose.
                warnings.filterwarnings("ignore", message=".*takes its statistics over each worker's own examples")
                outcome = job(*args)
        except BaseException as error:
            outcome = RemoteError(type(error).__name__, str(error), traceback.format_exc())
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        pipe.send(outcome)
