"""Who trains best on a given cluster? Paceline and its peers do the same job, one after the other.

    make peers
    python benchmarks/contest.py --cluster slow --task fashion-mnist --short

All have the same model, initial weights, data, seed, batch of a worker, optimizer settings, evaluation and clock. The
clock of a worker runs from its first step, which all begin together, and stands still while it writes a snapshot of its
parameters. Afterwards the workers' snapshots are averaged and tried on the test set. Those that wait for each other
stop at the same step: rank 0 writes it into the job's folder when its clock has passed the limit.

With ``--alone`` all workers train for some seconds without any communication, before and after each contestant: its
examples per second are told over theirs. With ``--unreliable`` one worker is killed on the way. Who dies of it has
failed; who can be started again is. With ``--keep`` what came of each training is kept in a line of a file, and what
was trained before with the same settings is not trained again.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from benchmarks import bench
from benchmarks.contestants import ROSTER, Contestant
from benchmarks.contestants.bout import Bout
from benchmarks.contestants.job import Settings, build
from benchmarks.contestants.judge import accuracy
from benchmarks.contestants.table import show, summarise
from benchmarks.training import Done
from paceline import tasks

SHORT, LONG = 40.0, 180.0  # seconds of training

MODELS: dict[str, dict[str, tuple[str, list[Any]]]] = {
    "digits": {"mlp": ("MLP", [[64, 128, 64, 10]]), "lenet": ("LeNet", [1, 8, 10])},
    # mlp and cnn have 0.94 and 0.96 million parameters: 3.8 MB, which a slow link feels.
    "fashion-mnist": {
        "mlp": ("MLP", [[784, 896, 256, 10]]),
        "lenet": ("LeNet", [1, 28, 10]),
        "cnn": ("LeNet", [1, 28, 10, [8, 16], [1200]]),
    },
    "cifar10": {"resnet": ("ResNet", [3, 10])},
}
LOST, LOST_AFTER = 1, 0.4  # the worker that is killed, and when: a part of the seconds that all have


class Usual(NamedTuple):
    """What a task is trained with, and until when, unless something else is said."""

    model: str
    target: float


USUAL = {"digits": Usual("mlp", 0.95), "fashion-mnist": Usual("mlp", 0.85), "cifar10": Usual("resnet", 0.6)}


def main(
    arguments: Sequence[str] | None = None,
    roster: Sequence[Contestant] = ROSTER,
    folder: Path | None = None,
    usual: Mapping[str, Usual] = USUAL,
) -> None:
    """Hold a contest, and show who did how."""
    options = _parse(arguments, roster, usual)
    chosen = [one for one in roster if not options.only or one.name in options.only]
    place = options.cluster if options.cluster != "local" else f"local-{options.workers}"
    question = f"contest-{Path(options.cluster).stem}-{options.task}" + ("-unreliable" if options.unreliable else "")
    done = Done(question, options.anew) if options.keep else None
    rounds: dict[str, list[dict[str, Any]]] = {one.name: [] for one in chosen}
    job: dict[str, Any] = {}  # the same for all seeds
    for turn in range(options.seeds):
        with tempfile.TemporaryDirectory(prefix="contest-") as work:
            settings, evaluate = prepare(Path(work), options, options.seed + turn)
            job = {key: value for key, value in asdict(settings).items() if key not in ("data", "initial", "seed")}
            judged = options.target, evaluate
            bout = Bout(settings, *judged, options.cluster, options.workers, options.alone, Path(work) / "job")
            for one in chosen:
                seconds = options.more.get(one.name, options.seconds)
                told = {"cluster": Path(place).stem, "task": options.task, "target": options.target}
                told |= {"alone": options.alone, **job, "seconds": seconds}
                found = done.get(one.name, settings.seed, told) if done else None
                if found is None:
                    print(f"round {turn + 1} of {options.seeds}: {one.title}", flush=True)
                    found = bout.let(one, seconds)
                    if done and not found.get("unstarted"):
                        done.add(one.name, settings.seed, told, found)
                rounds[one.name].append(found)
    results = {name: summarise(found) for name, found in rounds.items()}
    title = (
        f"{options.task} on {options.cluster}: {options.seconds:g} s of training, target {options.target:g}, "
        f"{settings.batch} examples a worker and step, SGD {settings.lr:g}, momentum {settings.momentum:g}"
    )
    show(title, chosen, results, settings.every)
    facts = {"cluster": options.cluster, "task": options.task, "target": options.target, "settings": job}
    facts |= {"seeds": [options.seed + turn for turn in range(options.seeds)], "more_seconds": options.more}
    notes = {one.name: note for one in chosen if (note := one.note.format(every=settings.every))}
    bench.report(question, {**facts, "notes": notes, "contestants": results}, folder)


def prepare(work: Path, options: argparse.Namespace, seed: int) -> tuple[Settings, Callable[[Tensor], float]]:
    """Write the data and the initial weights; gives the settings, and what tells the accuracy of parameters."""
    task = tasks.load(options.task)
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
        seed=seed,
        lost=LOST if options.unreliable else None,
        lost_at=LOST_AFTER * options.seconds if options.unreliable else 0.0,
    )
    torch.manual_seed(settings.seed)
    model = build(settings)
    torch.save(tensors(task.train), settings.data)
    torch.save(model.state_dict(), settings.initial)
    x, y = tensors(task.test)
    return settings, lambda parameters: accuracy(model, parameters, x, y)


def tensors(examples: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """All inputs and all targets of a data set."""
    x, y = default_collate([examples[at] for at in range(len(examples))])  # type: ignore[arg-type]
    return x, y


def _parse(
    arguments: Sequence[str] | None, roster: Sequence[Contestant], usual: Mapping[str, Usual]
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cluster", default="local", help="for `paceline lab`: a name or a file; local: no lab, no root"
    )
    parser.add_argument("--workers", type=int, default=2, help="with --cluster local")
    parser.add_argument("--task", choices=list(usual), default="fashion-mnist")
    parser.add_argument("--model", help="; ".join(f"{task}: {', '.join(MODELS[task])}" for task in MODELS))
    parser.add_argument("--short", action="store_true", help=f"{SHORT:g} s of training instead of {LONG:g} s")
    parser.add_argument("--seconds", type=float, help="of training, for each contestant")
    parser.add_argument(
        "--more", action="append", default=[], metavar="NAME=SECONDS", help="another time for a contestant"
    )
    parser.add_argument("--target", type=float, help="accuracy to reach")
    parser.add_argument("--every", type=int, default=16, help="steps between averages, for local SGD")
    parser.add_argument("--only", action="append", choices=[one.name for one in roster], metavar="NAME")
    parser.add_argument("--seeds", type=int, default=1, help="rounds; each round has all contestants, and a seed")
    parser.add_argument("--seed", type=int, default=0, help="the first: of initial weights and the order of examples")
    parser.add_argument("--alone", type=float, default=0.0, help="seconds in which workers train alone, in between")
    parser.add_argument("--unreliable", action="store_true", help=f"worker {LOST} is killed on the way")
    parser.add_argument("--keep", action="store_true", help="keep each training in benchmarks/trainings")
    parser.add_argument("--anew", action="store_true", help="train also what was kept before")
    options = parser.parse_args(arguments)
    options.model = options.model or usual[options.task].model
    if options.model not in MODELS[options.task]:
        parser.error(f"there is no model {options.model} for {options.task}: {', '.join(MODELS[options.task])}")
    for name in ("workers", "every", "seeds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.anew and not options.keep:
        parser.error("--anew has no effect without --keep")
    options.more = dict(_more(parser, text, roster) for text in options.more)
    options.seconds = options.seconds or (SHORT if options.short else LONG)
    options.target = usual[options.task].target if options.target is None else options.target
    return options


def _more(parser: argparse.ArgumentParser, text: str, roster: Sequence[Contestant]) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    if name not in [one.name for one in roster]:
        parser.error(f"--more {text}: there is no contestant {name}")
    try:
        return name, float(seconds)
    except ValueError:
        parser.error(f"--more {text}: write NAME=SECONDS")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers and files are gone then, too
    main()
