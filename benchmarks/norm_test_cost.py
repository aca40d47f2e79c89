"""What does it cost to measure the noise of the gradient in every step?

    make peers
    python benchmarks/norm_test_cost.py

Two workers on this machine, a batch that stays as it is: Paceline with ``NormTest`` over Paceline with a fixed batch,
and AdaptDL over torch DDP. With one micro-batch of each worker, their gradients are compared; with four, every one
needs a sketch. All run the whole time and take turns on the cores, as in sync_cost.py. Where the tensors of a process
lie makes a fifth of a step of 4 ms, so all are started several times, and the ratio is the median over all turns.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench
from benchmarks.contestants import Contestant
from benchmarks.contestants.cost_team import OUR_MODULE
from benchmarks.contestants.job import Settings, build
from benchmarks.sync_cost import EXAMPLES, assemble, dismiss, present, take_turns

_MODULES = "benchmarks.contestants"
ROSTER = [
    Contestant("fixed", "Paceline, fixed", OUR_MODULE, ("fixed",)),
    Contestant("norm-test", "Paceline, NormTest", OUR_MODULE, ("norm-test",)),
    Contestant("pieces", "Paceline, fixed, 4 micro-batches", OUR_MODULE, ("fixed", "pieces")),
    Contestant("tested pieces", "Paceline, NormTest, 4 micro-batches", OUR_MODULE, ("norm-test", "pieces")),
    Contestant("ddp", "torch DDP", f"{_MODULES}.cost_ddp"),
    Contestant("adaptdl", "AdaptDL", f"{_MODULES}.cost_adaptdl", environment="adaptdl"),
]
BASES = {"norm-test": "fixed", "tested pieces": "pieces", "adaptdl": "ddp"}
STARTS = 8
MODELS: dict[str, tuple[str, list[Any], int, int]] = {
    "lenet": ("LeNet", [1, 28, 10], 28, 40),  # class, arguments, side of the images, rounds
    "cnn": ("LeNet", [1, 28, 10, [8, 16], [1200]], 28, 40),
}


def measure(model: str, roster: Sequence[Contestant], rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of a training step of each contestant, and the ratio to what it is compared with."""
    name, arguments, side, _ = MODELS[model]
    with tempfile.TemporaryDirectory(prefix="norm-test-cost-") as work:
        settings = Settings(
            model=name,
            arguments=arguments,
            data=str(Path(work) / "data.pt"),
            initial=str(Path(work) / "initial.pt"),
            batch=32,
            lr=0.01,
            momentum=0.9,
            every=10,
            seconds=0.0,
            snapshot_every=0,
        )
        torch.manual_seed(settings.seed)
        torch.save((torch.randn(EXAMPLES, 1, side, side), torch.randint(10, (EXAMPLES,))), settings.data)
        torch.save(build(settings).state_dict(), settings.initial)
        seconds: dict[str, list[float]] = {one.name: [] for one in roster}
        for start in range(STARTS):
            folder = Path(work) / str(start)
            folder.mkdir()
            with ExitStack() as running:
                teams = assemble(roster, settings, folder, running)
                turns = take_turns(teams, "train", max(2, round(rounds / STARTS)))
                dismiss(teams.values())
            for key, found in turns.items():
                seconds[key] += [max(each["seconds"] for each in turn) for turn in found]
    rows = {}
    for one in roster:
        base = BASES.get(one.name, one.name)
        pair = {base: seconds[base], one.name: seconds[one.name]}
        rows[one.title] = bench.ratios(pair, base)[one.name]
    return rows


def main() -> None:
    """Measure, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=float, default=1.0, help="multiple of the usual number of rounds")
    options = parser.parse_args()
    chosen, missing = present(ROSTER)
    results: dict[str, Any] = {"skipped": missing}
    for model, (*_, rounds) in MODELS.items():
        results[model] = measure(model, chosen, round(options.rounds * rounds))
        bench.show(f"{model}, 2 workers, batch 64: a step; NormTest over fixed, AdaptDL over DDP", results[model])
    for name, reason in missing.items():
        print(f"skipped: {name}: {reason}")
    bench.report("norm-test-cost", results)


if __name__ == "__main__":
    main()
