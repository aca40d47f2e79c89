"""What the benchmarks share: interleaved blocks, ratios with spread, the machine, and JSON on the last line."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.spawn import spawn

import paceline
from paceline import Step
from paceline.heap import keep_freed

Block = Callable[[int], None]
"""Does so many steps."""


def launch(workers: int, job: Callable[..., Any], *args: Any) -> None:
    """Run ``job(*args)`` on so many local workers, with torchrun's variables and one thread each."""
    os.environ.update(keep_freed(os.environ))  # read by the workers' processes when they start
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    spawn(_begin, args=(workers, port, job, args), nprocs=workers)  # type: ignore[no-untyped-call]


def _begin(rank: int, workers: int, port: int, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(workers), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))  # taskset leaves room for others
    job(*args)


def training(stream: Iterator[Step], model: nn.Module, optimizer: torch.optim.Optimizer) -> Block:
    """Steps of a run that has no end, as a user would write them."""

    def block(steps: int) -> None:
        for _ in range(steps):
            step = next(stream)
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()

    return block


def build(makers: dict[str, Callable[[], Block]], start: int, starts: int) -> dict[str, Block]:
    """Make the contestants, at every one of an even number of starts in another order: each comes with its reverse.

    Where a contestant's tensors lie in memory makes a percent of its time, and that depends on who was built before.
    """
    names = list(makers)
    at = start // 2 * len(names) // (starts // 2)
    order = [*names[at:], *names[:at]]
    made = {name: makers[name]() for name in (order[::-1] if start % 2 else order)}
    return {name: made[name] for name in names}


def interleave(contestants: dict[str, Block], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of every contestant in every round; each round runs all, in an order that rotates.

    One round more is run first, and not counted.
    """
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.perf_counter()
            contestants[name](steps)
            if turn:
                seconds[name].append((time.perf_counter() - began) / steps)
    return seconds


def ratios(seconds: dict[str, list[float]], base: str) -> dict[str, dict[str, Any]]:
    """For every contestant: the median over the rounds of its time over that of ``base``, and the quartiles."""
    found = {}
    for name, times in seconds.items():
        each = [mine / other for mine, other in zip(times, seconds[base], strict=True)]
        low, middle, high = statistics.quantiles(each, n=4)
        found[name] = {
            "milliseconds": round(1e3 * statistics.median(times), 4),
            "ratio": round(middle, 4),
            "quartiles": [round(low, 4), round(high, 4)],
        }
    return found


def machine() -> dict[str, Any]:
    """Where this was measured."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "system": platform.platform(),
        "torch": str(torch.__version__),
        "paceline": paceline.__version__,
        "load": round(os.getloadavg()[0], 2),
    }


def results_in(folder: Path | None = None) -> Path:
    """Where results are kept."""
    folder = folder or Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    return folder


def trainings_in() -> Path:
    """Where trainings that took minutes are kept: in the repository, so that a comparison can go on elsewhere."""
    folder = Path(__file__).parent / "trainings"
    folder.mkdir(exist_ok=True)
    return folder


def report(question: str, results: dict[str, Any], folder: Path | None = None) -> None:
    """Write the result file, and print the same as one JSON line, the last."""
    found = {"question": question, "time": time.strftime("%Y-%m-%d %H:%M"), "machine": machine(), "results": results}
    (results_in(folder) / f"{question}.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


def show(title: str, rows: dict[str, dict[str, Any]]) -> None:
    """A small table for people."""
    print(title)
    for name, row in rows.items():
        low, high = row["quartiles"]
        print(
            f"  {name:34s} {row['milliseconds']:9.3f} ms   ratio {row['ratio']:.4f}   quartiles {low:.4f} … {high:.4f}"
        )
