"""A real all-reduce between two processes of this machine, to see that it works and how long it takes."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection, wait
from typing import Any

from paceline.errors import FleetError

__all__ = ["all_reduce_seconds"]

NUMBERS = 250_000  # a megabyte
REPEATS = 10


def all_reduce_seconds(limit: float = 60.0) -> float:
    """Seconds that one all-reduce of a megabyte takes between two processes; an error if it takes over the limit."""
    context = multiprocessing.get_context("spawn")  # a process that has used torch must not be forked
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        pair = [
            context.Process(target=_take_part, args=(rank, os.path.join(folder, "store"), theirs), daemon=True)
            for rank in (0, 1)
        ]
        for process in pair:
            process.start()
        try:
            # Whatever comes first: the answer, the end of a process, or the end of patience.
            wait([ours, *(process.sentinel for process in pair)], timeout=limit)
            if not ours.poll(1.0):
                ended = any(process.exitcode for process in pair)
                raise FleetError("a process ended with an error" if ended else f"no answer within {limit:g} s")
            answer: float | str = ours.recv()
        finally:
            for process in pair:
                process.kill()
                process.join()
    if isinstance(answer, str):
        raise FleetError(answer)
    return answer


def _take_part(rank: int, store: str, answer: Connection[Any, Any]) -> None:
    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        tensor = torch.ones(NUMBERS)
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - began)
        right = bool((tensor == 2.0**REPEATS).all())
        if rank == 0:
            answer.send(statistics.median(times) if right else "the sum of two workers' numbers came out wrong")
        dist.destroy_process_group()
    except RuntimeError as error:
        answer.send(str(error))
