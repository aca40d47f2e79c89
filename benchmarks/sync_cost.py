"""What does one synchronisation of local SGD cost, and how fast is training with one in 20 steps?

    make peers
    python benchmarks/sync_cost.py

Two workers on this machine. The cost is the time of an update that synchronises less that of one that does not, both
from when all workers have come to it; the slower worker counts. An update is ``optimizer.step()`` and what else the
library asks for before the next step. All contestants run the whole time, each in its own environment, and take turns
on the cores: the figure is the median over the rounds of Paceline's time over that of the other in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench
from benchmarks.contestants import Contestant
from benchmarks.contestants.bout import python_of
from benchmarks.contestants.cost_team import OUR_MODULE, WORKERS, Failed, Team
from benchmarks.contestants.job import Settings, build

__all__ = [
    "EXAMPLES",
    "ROSTER",
    "Failed",
    "Workload",
    "assemble",
    "check",
    "compare_means",
    "dismiss",
    "measure",
    "present",
    "table",
    "take_turns",
]

EVERY = 20
EXAMPLES = 4096
# Models' means are compared in units of the gradient. A round moves the average by 9 to 15, and one worker's model by a
# third less or more, so that this sees who is taken for the average. Rounding is below 0.001.
TOLERANCE = 0.1

OURS = "paceline"
_MODULES = "benchmarks.contestants"
ROSTER = [
    Contestant(OURS, "Paceline LocalSGD", OUR_MODULE),
    Contestant("post-local-sgd", "torch PostLocalSGD", f"{_MODULES}.cost_post_local_sgd"),
    Contestant("accelerate", "accelerate LocalSGD", f"{_MODULES}.cost_accelerate", environment="accelerate"),
    Contestant("torchft", "torchft LocalSGD", f"{_MODULES}.cost_torchft", environment="torchft"),
]


@dataclass(frozen=True)
class Workload:
    """A model, and how often each contestant has its turn with it."""

    sizes: list[int]
    """Of the layers of an MLP."""
    cost_rounds: int
    train_rounds: int


WORKLOADS = {
    "0.4 M": Workload([784, 448, 96, 10], 150, 30),
    # As many tensors (62) and numbers as ResNet18 has parameters. Its forward pass is never needed.
    "11 M": Workload([784, *[600] * 30, 10], 12, 0),
}


def check(title: str, answers: Sequence[dict[str, Any]]) -> None:
    """Workers that trained alone must differ, and after a synchronisation have the same bits."""
    if "own" in answers[0] and len({answer["own"] for answer in answers}) == 1:
        raise Failed(f"{title}: workers have the same model after a step of their own; nothing was to be synchronised")
    if len({answer["shared"] for answer in answers}) > 1:
        raise Failed(f"{title}: workers have different models after the step that was to synchronise them")


def compare_means(answers: dict[str, list[dict[str, Any]]]) -> None:
    """All contestants must have the same model after a round: the average, not that of one worker."""
    means = {name: answer[0]["mean"] for name, answer in answers.items() if "mean" in answer[0]}
    if means and max(means.values()) - min(means.values()) > TOLERANCE:
        raise Failed(f"contestants have different averages after the same steps: {means}")


def take_turns(teams: dict[str, Team], order: str, rounds: int) -> dict[str, list[list[dict[str, Any]]]]:
    """The answers of all workers of each team in each round, in an order that rotates.

    One round more is done first, and not counted.
    """
    names = list(teams)
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        answers = {}
        for name in names[first:] + names[:first]:
            answers[name] = teams[name].turn(order)
            check(teams[name].title, answers[name])
        compare_means(answers)
        if number:
            for name in names:
                found[name].append(answers[name])
    return found


def table(answers: dict[str, list[list[dict[str, Any]]]]) -> dict[str, dict[str, Any]]:
    """For every contestant the time of its slower worker, and Paceline's over it."""
    seconds = {name: [max(each["seconds"] for each in turn) for turn in turns] for name, turns in answers.items()}
    rows = {}
    for name in seconds:
        pair = bench.ratios({OURS: seconds[OURS], name: seconds[name]}, name)
        idle = statistics.median(max(each["idle"] for each in turn) for turn in answers[name])
        rows[name] = {**pair[OURS], "milliseconds": pair[name]["milliseconds"], "idle_cores": round(idle, 4)}
    return rows


def assemble(roster: Sequence[Contestant], settings: Settings, work: Path, stack: ExitStack) -> dict[str, Team]:
    """A team for each contestant, ready for orders; what still runs ends with the stack."""
    teams = {}
    for one in roster:
        teams[one.name] = Team(one, settings, work / one.name)
        stack.callback(teams[one.name].kill)
    for team in teams.values():
        team.answers()
    return teams


def measure(workload: Workload, roster: Sequence[Contestant]) -> dict[str, dict[str, dict[str, Any]]]:
    """The tables of a workload: cost, and train if it has such rounds."""
    with tempfile.TemporaryDirectory(prefix="sync-cost-") as work, ExitStack() as stack:
        settings = prepare(workload, Path(work))
        teams = assemble(roster, settings, Path(work), stack)
        # Training comes last: as soon as weights differ by rounding it takes them apart.
        wanted = {"cost": workload.cost_rounds, "train": workload.train_rounds}
        found = {order: table(take_turns(teams, order, rounds)) for order, rounds in wanted.items() if rounds}
        dismiss(teams.values())
    return found


def dismiss(teams: Iterable[Team]) -> None:
    """All is measured. A peer may still end badly (threads of gloo do, now and then), which is told; we may not."""
    for team in teams:
        try:
            team.part()
        except Failed as error:
            if team.ours:
                raise
            print(f"after all was measured: {error}")


def prepare(workload: Workload, work: Path) -> Settings:
    """Write data and initial weights, the same for all."""
    settings = Settings(
        model="MLP",
        arguments=[workload.sizes],
        data=str(work / "data.pt"),
        initial=str(work / "initial.pt"),
        batch=32,
        lr=0.05,
        momentum=0.9,
        every=EVERY,
        seconds=0.0,  # no clock ends it, and there are no snapshots
        snapshot_every=0,
    )
    torch.manual_seed(settings.seed)
    inputs, classes = workload.sizes[0], workload.sizes[-1]
    torch.save((torch.randn(EXAMPLES, inputs), torch.randint(classes, (EXAMPLES,))), settings.data)
    torch.save(build(settings).state_dict(), settings.initial)
    return settings


def present(roster: Sequence[Contestant]) -> tuple[list[Contestant], dict[str, str]]:
    """Who can take part, and why others cannot."""
    missing = {
        one.name: f"not installed: there is no .peers/{one.environment}; run `make peers`"
        for one in roster
        if not python_of(one).exists()
    }
    return [one for one in roster if one.name not in missing], missing


def main(
    arguments: Sequence[str] | None = None, roster: Sequence[Contestant] = ROSTER, folder: Path | None = None
) -> None:
    """Measure, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=float, default=1.0, help="multiple of the usual number of rounds")
    parser.add_argument("--model", choices=list(WORKLOADS), action="append", help="parameters; default: all")
    options = parser.parse_args(arguments)
    chosen, missing = present(roster)
    titles = {one.name: one.title for one in roster}
    results: dict[str, Any] = {"workers": WORKERS, "every": EVERY, "skipped": missing}
    for name in options.model or WORKLOADS:
        usual = WORKLOADS[name]
        # Quartiles need two rounds.
        rounds = [
            max(2, round(options.rounds * each)) if each else 0 for each in (usual.cost_rounds, usual.train_rounds)
        ]
        results[name] = measure(Workload(usual.sizes, *rounds), chosen)
        for order, rows in results[name].items():
            what = {"cost": "cost of a synchronisation", "train": f"a training step, 1 in {EVERY} synchronises"}[order]
            bench.show(
                f"{name} parameters, {WORKERS} workers: {what}; ratio: Paceline's over it",
                {titles[key]: row for key, row in rows.items()},
            )
    for name, reason in missing.items():
        print(f"skipped: {titles[name]}: {reason}")
    bench.report("sync-cost", results, folder)


if __name__ == "__main__":
    main()
