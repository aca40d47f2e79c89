"""How fast is the lattice, next to copying the same numbers?

One thread. Ten million numbers are encoded, decoded and copied in turn; the figure is the time of two copies over that
of encoding and decoding, the median over the rounds, with quartiles. Each of the three has memory of its own, so that
none profits from what another has just touched. Warm: each is done twice, and the second time counts. Cold: once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import bench
from paceline.codec import Lattice, lattice

REACH = 3e-3


def computed_by(kernel: str) -> AbstractContextManager[Any]:
    """While inside, numba is there or not."""
    return patch.object(lattice, "has_numba", lambda: kernel == "numba")


def seconds(work: Callable[[], Any], warm: bool) -> float:
    """How long it takes."""
    if warm:
        work()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(kernel: str, bits: int, warm: bool, numel: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of each, and two copies over encoding and decoding."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(numel, generator=generator)
    near = values + REACH / 3 * torch.randn(numel, generator=generator).clamp(-3, 3)
    source, target = values.clone(), near.clone()
    codec, out = Lattice(bits), torch.empty(numel)
    reach, apart = torch.full((codec.blocks(numel),), REACH), torch.empty(codec.blocks(numel))
    with computed_by(kernel):
        assert codec.kernel == kernel
        payload = codec.encode(values, reach)
        assert codec.decode(payload, near, out, apart) == 0
        found: dict[str, list[float]] = {"encode": [], "decode": [], "copy": []}
        for _ in range(rounds):
            found["encode"].append(seconds(lambda: codec.encode(values, reach), warm))
            found["decode"].append(seconds(lambda: codec.decode(payload, near, out, apart), warm))
            found["copy"].append(seconds(lambda: target.copy_(source), warm))
    each = [2 * copy / (one + two) for one, two, copy in zip(*found.values(), strict=True)]
    low, middle, high = statistics.quantiles(each, n=4)
    row: dict[str, Any] = {name: round(1e3 * statistics.median(times), 2) for name, times in found.items()}
    return {**row, "two copies over it": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}


def main() -> None:
    """Measure, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        f"{kernel}, {bits} bits, {'warm' if warm else 'cold'}": measure(
            kernel, bits, warm, options.numel, options.rounds
        )
        for kernel in ("numba", "torch")
        for bits in (4, 8, 16)
        for warm in (True, False)
    }
    for name, row in results.items():
        print(f"{name:22s} {row}")
    bench.report("lattice", {"options": vars(options), **results})


if __name__ == "__main__":
    main()
