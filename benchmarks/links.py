"""Do the lab's links slow down training as the arithmetic predicts?

Hand-written DDP on four workers, once behind 100 Mbit/s (the example ``slow``), once with the same processors behind
links that do not matter. A ring all-reduce of S bytes among n workers lets each send 2 (n - 1) / n S bytes, so a step
should take that much longer, over the rate. The interfaces should count the same number times the steps. Both with the
headers of TCP, IP and Ethernet, which are 3.6 % of what travels.
Needs what ``paceline lab`` needs: root, iproute2, cgroups.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import bench
from paceline.lab import Cluster, Lab, Link, find_cluster, read_cluster, run_workers
from paceline.lab.tools import missing

PAYLOAD = 1460 / 1514  # of an Ethernet frame of full length: what TCP, IP and Ethernet leave for data
FREE = Link(10**10, 10**10)


def worker(out: str, steps: int) -> None:
    """Train for so many steps; rank 0 writes the seconds of each and the bytes of the gradients."""
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 200), nn.ReLU(), nn.Linear(200, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(32, 784), torch.randint(10, (32,))
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(ddp(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        Path(out).write_text(json.dumps({"seconds": seconds, "bytes": size}))
    dist.destroy_process_group()


def measure(cluster: Cluster, steps: int) -> tuple[float, list[int], int]:
    """Median seconds of a step, bytes that each worker sent, and bytes of the gradients."""
    with tempfile.TemporaryDirectory() as folder, Lab(cluster) as lab:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.links", "--worker", str(out), "--steps", str(steps)]
        said: list[str] = []
        report = run_workers(lab, command, show=lambda name, line: said.append(f"{name} | {line}"), limit=600)
        if report.exit:
            raise SystemExit("\n".join(said[-30:]))
        found = json.loads(out.read_text())
    return statistics.median(found["seconds"][2:]), [each.bytes_sent for each in report.workers], found["bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.steps)
        return
    if lacks := missing():
        raise SystemExit(f"the lab cannot work here: {'; '.join(lacks)}")
    slow = read_cluster(find_cluster("slow"))
    free = msgspec.structs.replace(
        slow, workers=tuple(msgspec.structs.replace(each, link=FREE) for each in slow.workers)
    )
    rate, count = slow.workers[0].link.up, len(slow.workers)
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds):
        base, _, size = measure(free, options.steps)
        found, sent, _ = measure(slow, options.steps)
        per_step = 2 * (count - 1) / count * size
        predicted = base + 8 * per_step / (rate * PAYLOAD)
        # DDP sends rank 0's parameters to all at the start; a worker passes on what the broadcast's tree asks of it.
        expected = (per_step * options.steps * count + (count - 1) * size) / PAYLOAD
        rows.append(
            {
                "seconds_without_limit": round(base, 4),
                "seconds": round(found, 4),
                "predicted": round(predicted, 4),
                "time_ratio": round(found / predicted, 4),
                "bytes": sum(sent),
                "expected_bytes": round(expected),
                "bytes_ratio": round(sum(sent) / expected, 4),
            }
        )
        print(f"round {number}: {rows[-1]}", flush=True)
    ratios = {key: [row[key] for row in rows] for key in ("time_ratio", "bytes_ratio")}
    for key, values in ratios.items():
        print(f"{key}: median {statistics.median(values):.3f}, from {min(values):.3f} to {max(values):.3f}")
    bench.report("links", {"rounds": rows, **{key: statistics.median(values) for key, values in ratios.items()}})


if __name__ == "__main__":
    main()
