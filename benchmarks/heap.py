"""What does it cost that freed memory goes back to the system in every step?

Single processes of one thread train on random images: as they come, and with the variables by which ``paceline run``
and ``paceline lab`` tell glibc to keep freed memory. A process is fast or slow for as long as it lives, so every figure
is from many of them, which take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import bench
from paceline.heap import keep_freed
from paceline.tasks.models import LeNet, ResNet

STARTS, WARM_UP = 20, 30
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {  # what makes it, its input, steps
    "LeNet, batch 32": (lambda: LeNet(1, 28, 10), (32, 1, 28, 28), 300),
    "LeNet, batch 256": (lambda: LeNet(1, 28, 10), (256, 1, 28, 28), 60),
    "small ResNet, batch 32": (lambda: ResNet(3, 10), (32, 3, 32, 32), 20),
}
WAYS = {"as it comes": False, "kept": True}


def train(model: str) -> dict[str, float]:
    """Milliseconds and page faults of a step, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, shape, steps = MODELS[model]
    module = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(shape), torch.randint(10, shape[:1])
    began = faults = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            began, faults = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    spent, met = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return {"milliseconds": 1000 * spent / steps, "faults": met / steps}


def start(model: str, kept: bool) -> dict[str, float]:
    """The same in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment |= keep_freed(environment) if kept else {}
    command = [sys.executable, "-m", "benchmarks.heap", "--train", model]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=600)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=STARTS, help="processes of each kind")
    parser.add_argument("--train", choices=MODELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        print(json.dumps(train(options.train)))
        return
    results: dict[str, Any] = {}
    for model in MODELS:
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(options.starts):
            for way in list(WAYS) if number % 2 else reversed(WAYS):
                found[way].append(start(model, WAYS[way]))
        print(f"{model}: a step's processor time, and its page faults")
        for way, rows in found.items():
            times, faults = ([row[name] for row in rows] for name in ("milliseconds", "faults"))
            print(
                f"  {way:12s} {statistics.median(times):7.2f} ms ({min(times):.2f} … {max(times):.2f}), "
                f"{statistics.median(faults):6.0f} faults ({min(faults):.0f} … {max(faults):.0f})"
            )
        results[model] = found
    bench.report("heap", results)


if __name__ == "__main__":
    main()
