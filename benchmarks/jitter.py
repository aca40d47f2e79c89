"""Where workers are equally fast and only their timing is noisy: do shares by speed stay even, and what do they cost?

Two workers of this machine train LeNet on random images with ``Even`` and with ``BySpeed``, in short blocks that take
turns in the same processes. Meanwhile another process for each core computes in bursts of random length, a fifth of the
time. The figure is the median over the rounds of the ratio of the times of a step; beside it stand the shares that
``BySpeed`` has had.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import paceline as pl
from benchmarks import bench
from paceline.roles import Balance
from paceline.tasks.models import LeNet

WORKERS, STARTS = 2, 4
BATCH, EXAMPLES = 256, 4096
ROUNDS, STEPS = 200, 5
FOREVER = 10**9
FIRST_LOOK = 20  # steps, in which shares are even anyway
BUSY, REST = 0.02, 0.08  # seconds of bursts and pauses, on average
BALANCES: dict[str, Callable[[], Balance]] = {"even": pl.balance.Even, "by speed": pl.balance.BySpeed}


def disturb(seed: int) -> None:
    """Compute in bursts, until killed."""
    chance = random.Random(seed)
    while True:
        until = time.monotonic() + chance.expovariate(1 / BUSY)
        while time.monotonic() < until:
            pass
        time.sleep(chance.expovariate(1 / REST))


def worker(start: int, rounds: int, out: str) -> None:
    """Train with both, and write the seconds of every block and the shares after it."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(EXAMPLES, 1, 28, 28), torch.randint(10, (EXAMPLES,)))
    pl.Fleet.join()
    shares: list[int] = []

    def make(kind: Callable[[], Balance]) -> bench.Block:
        balance = kind()
        model = LeNet(1, 28, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        run = pl.Run(model, optimizer, dataset, batch=BATCH, balance=balance)
        train = bench.training(run.steps(steps=FOREVER), model, optimizer)

        def block(steps: int) -> None:
            train(steps)
            if isinstance(balance, pl.balance.BySpeed):
                shares.append(balance.split(BATCH, WORKERS)[0])

        return block

    contestants = bench.build({name: partial(make, kind) for name, kind in BALANCES.items()}, start, STARTS)
    for block in contestants.values():
        block(FIRST_LOOK)
    shares.clear()
    seconds = bench.interleave(contestants, rounds, STEPS)
    if dist.get_rank() == 0:
        torch.save((seconds, shares), out)


def main() -> None:
    """Measure, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=float, default=1.0, help="multiple of the usual number of rounds")
    parser.add_argument("--disturb", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.disturb is not None:
        disturb(options.disturb)
    rounds = max(2, round(options.rounds * ROUNDS / STARTS))
    seconds: dict[str, list[float]] = {name: [] for name in BALANCES}
    shares: list[int] = []
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for seed in range(WORKERS):
            noise = subprocess.Popen([sys.executable, "-m", "benchmarks.jitter", "--disturb", str(seed)])
            stack.callback(noise.wait)
            stack.callback(noise.kill)
        out = Path(folder) / "found.pt"
        for start in range(STARTS):
            bench.launch(WORKERS, worker, start, rounds, str(out))
            found, seen = torch.load(out, weights_only=True)
            shares += seen
            for name in BALANCES:
                seconds[name] += found[name]
    rows = bench.ratios(seconds, "even")
    bench.show(f"LeNet, {WORKERS} equal workers, batch {BATCH}, bursts on every core; ratio to Even", rows)
    away = [abs(2 * share / BATCH - 1) for share in shares]
    changed = sum(each > 0 for each in away) / len(away)
    print(f"  shares: at most {max(away):.1%} from even, uneven after {changed:.1%} of the blocks")
    bench.report("jitter", {**rows, "farthest": max(away), "uneven_blocks": changed})


if __name__ == "__main__":
    main()
