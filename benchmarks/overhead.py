"""What does a run cost per step over hand-written DistributedDataParallel? And what recording and norm tests?

Two workers train LeNet, a wider one and the small ResNet on random images. Blocks of steps of every contestant are
interleaved in the same processes; the figure is the median over the rounds of the ratio to hand-written DDP in the same
round; for recording and the norm test, to the same run without. Which of two equal models lies where in memory makes a
percent, so the processes are started four times, with the contestants built in four orders: two and their reverses.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline as pl
from benchmarks import bench
from benchmarks.contestants.cost_paceline import Same
from paceline import record
from paceline.roles import Batch
from paceline.tasks.models import LeNet, ResNet

EXAMPLES = 4096
BATCH = 64
FOREVER = 10**9
# Blocks are short, so that those of a round meet the same disturbances, and many, since each is noisy.
ROUNDS = {"lenet": 300, "cnn": 300, "resnet": 40}
STEPS = {"lenet": 5, "cnn": 5, "resnet": 1}
STARTS = 4
BESIDE = {  # contestants whose figure is the ratio to a run that differs in this alone
    "run, recording": "run",
    "run, norm test": "run",
    "run, 2 micro-batches, norm test": "run, 2 micro-batches",
}


def by_hand(model: nn.Module, dataset: TensorDataset, micro_batches: int) -> bench.Block:
    """The loop that a careful user of torch writes: examples picked from tensors, accumulation under no_sync."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = dataset.tensors
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    share = BATCH // size
    micro = share // micro_batches

    def batches() -> Iterator[torch.Tensor]:
        epoch = 0
        while True:
            order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(epoch))
            for at in range(0, EXAMPLES, BATCH):
                yield order[at + rank * share : at + (rank + 1) * share]
            epoch += 1

    stream = batches()

    def block(steps: int) -> None:
        for _ in range(steps):
            ids = next(stream)
            optimizer.zero_grad()
            for at in range(micro_batches - 1):
                part = ids[at * micro : (at + 1) * micro]
                with ddp.no_sync():
                    (F.cross_entropy(ddp(x[part]), y[part]) / micro_batches).backward()  # type: ignore[no-untyped-call]
            part = ids[(micro_batches - 1) * micro :]
            (F.cross_entropy(ddp(x[part]), y[part]) / micro_batches).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return block


def by_run(
    model: nn.Module, dataset: TensorDataset, wrap: bool = False, batch: int | Batch = BATCH, **settings: Any
) -> bench.Block:
    wrapped = DistributedDataParallel(model) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run = pl.Run(wrapped, optimizer, dataset, batch=batch, **settings)
    return bench.training(run.steps(steps=FOREVER), wrapped, optimizer)


def tested() -> Batch:
    """A norm test in every step, and the same batch."""
    return Same(start=BATCH, limit=2 * BATCH, eta=0.5)


def recorders(folder: Path) -> list[Any]:
    """All that ``record.folder`` makes, the console writing to a file."""
    return [
        record.JsonLines(folder / "events.jsonl"),
        record.Trace(folder / "trace.json"),
        record.TensorBoard(folder / "tensorboard"),
        record.Console(open(folder / "console.txt", "w")),
    ]


def worker(name: str, start: int, rounds: int, steps: int, out: str) -> None:
    torch.manual_seed(0)
    build: Callable[[], nn.Module]
    if name == "lenet":
        build, shape = lambda: LeNet(1, 28, 10), (1, 28, 28)
    elif name == "cnn":
        build, shape = lambda: LeNet(1, 28, 10, (8, 16), (1200,)), (1, 28, 28)
    else:
        build, shape = lambda: ResNet(3, 10), (3, 32, 32)
    dataset = TensorDataset(torch.randn(EXAMPLES, *shape), torch.randint(10, (EXAMPLES,)))
    pl.Fleet.join()
    half = BATCH // dist.get_world_size() // 2
    makers: dict[str, Callable[[], bench.Block]] = {
        "ddp": lambda: by_hand(build(), dataset, 1),
        "run": lambda: by_run(build(), dataset),
        "run, DDP-wrapped": lambda: by_run(build(), dataset, wrap=True),
        "run, probe": lambda: by_run(build(), dataset, probe=pl.Probe(always=True)),
        "run, recording": lambda: by_run(build(), dataset, record=recorders(Path(tempfile.mkdtemp()))),
        "run, norm test": lambda: by_run(build(), dataset, batch=tested()),
        "ddp, 2 micro-batches": lambda: by_hand(build(), dataset, 2),
        "run, 2 micro-batches": lambda: by_run(build(), dataset, micro=half),
        "run, 2 micro-batches, probe": lambda: by_run(build(), dataset, micro=half, probe=pl.Probe(always=True)),
        "run, 2 micro-batches, norm test": lambda: by_run(build(), dataset, batch=tested(), micro=half),
    }
    seconds = bench.interleave(bench.build(makers, start, STARTS), rounds, steps)
    if dist.get_rank() == 0:
        torch.save(seconds, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=float, default=1.0, help="multiple of the usual number of rounds")
    parser.add_argument("--model", choices=list(STEPS), action="append", help="default: all")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.model or STEPS:
        rounds = max(2, round(options.rounds * ROUNDS[name] / STARTS))
        seconds: dict[str, list[float]] = {}
        for start in range(STARTS):
            with tempfile.TemporaryDirectory() as folder:
                out = str(Path(folder) / "seconds.pt")
                bench.launch(2, worker, name, start, rounds, STEPS[name], out)
                for key, times in torch.load(out, weights_only=True).items():
                    seconds.setdefault(key, []).extend(times)
        alone = {key: times for key, times in seconds.items() if "2 micro" not in key}
        split = {key: times for key, times in seconds.items() if "2 micro" in key}
        beside = {
            key: bench.ratios({each: seconds[each] for each in (base, key)}, base)[key] for key, base in BESIDE.items()
        }
        rows = {**bench.ratios(alone, "ddp"), **bench.ratios(split, "ddp, 2 micro-batches")}
        bench.show(f"{name}, 2 workers, batch {BATCH}, ratio to DDP", rows)
        bench.show("ratio to the same run without", beside)
        results[name] = {**rows, **{f"{key}, over the same without": row for key, row in beside.items()}}
    bench.report("overhead", results)


if __name__ == "__main__":
    main()
