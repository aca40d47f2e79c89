"""Who trains best on a given cluster? Paceline and its peers do the same job, one after the other.

    make peers
    python benchmarks/contest.py --cluster slow --task fashion-mnist --short

All have the same model, initial weights, data, seed, batch of a worker, optimizer settings, evaluation and clock. The
clock of a worker runs from its first step, which all begin together, and stands still while it writes a snapshot of its
parameters. Afterwards the workers' snapshots are averaged and tried on the test set. Those that wait for each other
stop at the same step: rank 0 writes it into the job's folder when its clock has passed the limit.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks import bench
from benchmarks.contestants import ROSTER, Contestant
from benchmarks.contestants.job import Settings, build
from benchmarks.contestants.judge import Disqualified, accuracy, judge
from benchmarks.contestants.launch import ROOT, Outcome, run_workers
from paceline import tasks

GRACE = 120.0  # seconds that a contestant may need for everything but training: imports, connections, parting
SHORT, LONG = 40.0, 180.0  # seconds of training

MODELS: dict[str, dict[str, tuple[str, list[Any]]]] = {
    "digits": {"mlp": ("MLP", [[64, 128, 64, 10]]), "lenet": ("LeNet", [1, 8, 10])},
    # mlp and cnn have 0.94 and 0.96 million parameters: 3.8 MB, which a slow link feels.
    "fashion-mnist": {
        "mlp": ("MLP", [[784, 896, 256, 10]]),
        "lenet": ("LeNet", [1, 28, 10]),
        "cnn": ("LeNet", [1, 28, 10, [8, 16], [1200]]),
    },
}
TARGETS = {"digits": 0.95, "fashion-mnist": 0.85}


class Field(NamedTuple):
    """A number of the results, and how the table shows it."""

    title: str
    show: Callable[[float], str]


FIELDS = {
    "time_to_target": Field("to target, s", "{:.1f}".format),
    "final_accuracy": Field("accuracy", "{:.4f}".format),
    "examples_per_second": Field("examples/s", "{:.0f}".format),
    "bytes_sent": Field("MB sent", lambda value: f"{value / 1e6:.1f}"),
    "bytes_per_example": Field("bytes/example", "{:.0f}".format),
    "cpu_seconds": Field("cpu, s", "{:.0f}".format),
    "largest_wait": Field("largest wait", "{:.0%}".format),
}


def main(
    arguments: Sequence[str] | None = None, roster: Sequence[Contestant] = ROSTER, folder: Path | None = None
) -> None:
    """Hold a contest, and show who did how."""
    options = _parse(arguments, roster)
    chosen = [one for one in roster if not options.only or one.name in options.only]
    with tempfile.TemporaryDirectory(prefix="contest-") as work:
        settings, evaluate = prepare(Path(work), options)
        rounds: dict[str, list[dict[str, Any]]] = {one.name: [] for one in chosen}
        for turn in range(options.repeat):
            for contestant in chosen:
                print(f"round {turn + 1} of {options.repeat}: {contestant.title}", flush=True)
                rounds[contestant.name].append(compete(contestant, settings, evaluate, options, Path(work) / "job"))
    results = {name: summarise(found) for name, found in rounds.items()}
    show(chosen, results, settings, options)
    job = {key: value for key, value in asdict(settings).items() if key not in ("data", "initial")}
    facts = {"cluster": options.cluster, "task": options.task, "target": options.target, "settings": job}
    notes = {one.name: note for one in chosen if (note := one.note.format(every=settings.every))}
    question = f"contest-{Path(options.cluster).stem}-{options.task}"
    bench.report(question, {**facts, "notes": notes, "contestants": results}, folder)


def prepare(work: Path, options: argparse.Namespace) -> tuple[Settings, Callable[[Tensor], float]]:
    """Write the data and the initial weights; gives the settings, and what tells the accuracy of parameters."""
    task = tasks.load(options.task)
    assert isinstance(task.train, TensorDataset)
    assert isinstance(task.test, TensorDataset)
    model_class, arguments = MODELS[options.task][options.model]
    settings = Settings(
        model=model_class,
        arguments=arguments,
        data=str(work / "data.pt"),
        initial=str(work / "initial.pt"),
        batch=64,
        lr=0.05,
        momentum=0.9,
        every=options.every,
        seconds=options.seconds,
        snapshot_every=5,
        seed=options.seed,
    )
    torch.manual_seed(settings.seed)
    model = build(settings)
    torch.save(task.train.tensors, settings.data)
    torch.save(model.state_dict(), settings.initial)
    x, y = task.test.tensors
    return settings, lambda parameters: accuracy(model, parameters, x, y)


def compete(
    contestant: Contestant,
    settings: Settings,
    evaluate: Callable[[Tensor], float],
    options: argparse.Namespace,
    folder: Path,
) -> dict[str, Any]:
    """Let one contestant train, in a folder that is gone afterwards, and judge it."""
    python = ROOT / ".peers" / contestant.environment / "bin" / "python" if contestant.environment else sys.executable
    if not Path(python).exists():
        return {"failed": f"not installed: there is no .peers/{contestant.environment}; run `make peers`"}
    folder.mkdir()
    try:
        settings.write(folder)
        command = [str(python), "-m", contestant.module, str(folder), *contestant.arguments]
        outcome = run_workers(options.cluster, options.workers, command, folder, settings.seconds + GRACE)
        if outcome.failure:
            return {"failed": outcome.failure}
        verdict = judge(folder / "snapshots", len(outcome.workers), options.target, evaluate)
    except Disqualified as error:
        return {"failed": str(error)}
    finally:
        shutil.rmtree(folder)
    spent = resources(outcome, verdict.examples)
    return {**asdict(verdict), "examples_per_second": verdict.examples / verdict.seconds, **spent}


def resources(outcome: Outcome, examples: int) -> dict[str, Any]:
    """What the workers used, by the launcher's count: everything since they were started, not training alone."""
    rows = outcome.workers
    sent = None if any(row["bytes_sent"] is None for row in rows) else sum(row["bytes_sent"] for row in rows)
    known = [row for row in rows if row["waiting_seconds"] is not None and row["wall_seconds"] > 0]
    waits = [row["waiting_seconds"] / row["wall_seconds"] for row in known]
    return {
        "bytes_sent": sent,
        "bytes_per_example": None if sent is None else sent / examples,
        "cpu_seconds": sum(row["cpu_seconds"] for row in rows),
        "largest_wait": max(waits, default=None),
    }


def summarise(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The medians of the rounds that went well and, of several, the smallest and largest values; what failed.

    A target that was not reached counts as reached after all others: it is None in the end if most rounds missed it.
    """
    failed = [one["failed"] for one in rounds if "failed" in one]
    good = [one for one in rounds if "failed" not in one]
    found: dict[str, Any] = {"rounds": len(good), "failures": failed}
    for field in good[0] if good else ():
        values = sorted((one[field] for one in good), key=lambda value: (value is None, value))
        low, high = values[(len(values) - 1) // 2], values[len(values) // 2]
        found[field] = low if low == high else None if high is None else (low + high) / 2
        if len(values) > 1:
            found.setdefault("spread", {})[field] = [values[0], values[-1]]
    return found


def show(
    chosen: Sequence[Contestant], results: dict[str, dict[str, Any]], settings: Settings, options: argparse.Namespace
) -> None:
    """The table for people, with a footnote for what was chosen for a contestant."""
    title = (
        f"{options.task} on {options.cluster}: {settings.seconds:g} s of training, target {options.target:g}, "
        f"{settings.batch} examples a worker and step, SGD {settings.lr:g}, momentum {settings.momentum:g}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("contestant")
    for field in FIELDS.values():
        table.add_column(field.title, justify="right")
    notes: list[str] = []
    for one in chosen:
        result, name = results[one.name], one.title
        if one.note:
            notes.append(one.note.format(every=settings.every))
            name += f" [{len(notes)}]"
        cells = [_cell(result, field) for field in FIELDS] if result["rounds"] else ["failed"]
        table.add_row(_plain(name), *cells)
    # A file or a pipe has no width; the table needs some.
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    for number, note in enumerate(notes, 1):
        console.print(_plain(f"[{number}] {note}"))
    for one in chosen:
        for reason in results[one.name]["failures"]:
            console.print(_plain(f"failed: {one.title}: {reason}"))


def _cell(result: dict[str, Any], name: str) -> str:
    if result[name] is None:
        return "–"
    text = FIELDS[name].show(result[name])
    if "spread" in result:
        low, high = ("–" if value is None else FIELDS[name].show(value) for value in result["spread"][name])
        text += f"\n({low} … {high})"
    return text


def _plain(text: str) -> str:
    """Keep rich from taking brackets for markup."""
    return text.replace("[", r"\[")


def _parse(arguments: Sequence[str] | None, roster: Sequence[Contestant]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cluster", default="local", help="for `paceline lab`: a name or a file; local: no lab, no root"
    )
    parser.add_argument("--workers", type=int, default=2, help="with --cluster local")
    parser.add_argument("--task", choices=list(MODELS), default="fashion-mnist")
    parser.add_argument(
        "--model", default="mlp", help="; ".join(f"{task}: {', '.join(MODELS[task])}" for task in MODELS)
    )
    parser.add_argument("--short", action="store_true", help=f"{SHORT:g} s of training instead of {LONG:g} s")
    parser.add_argument("--seconds", type=float, help="of training, for each contestant")
    parser.add_argument("--target", type=float, help="accuracy to reach")
    parser.add_argument("--every", type=int, default=16, help="steps between averages, for local SGD")
    parser.add_argument("--only", action="append", choices=[one.name for one in roster], metavar="NAME")
    parser.add_argument("--repeat", type=int, default=1, help="rounds; each round has all contestants")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and the order of the examples")
    options = parser.parse_args(arguments)
    if options.model not in MODELS[options.task]:
        parser.error(f"there is no model {options.model} for {options.task}: {', '.join(MODELS[options.task])}")
    for name in ("workers", "every", "repeat"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    options.seconds = options.seconds or (SHORT if options.short else LONG)
    options.target = TARGETS[options.task] if options.target is None else options.target
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers and files are gone then, too
    main()
