"""``paceline compare``: the same task under several settings, and a report."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline import tasks
from paceline.cli.demo import EPOCHS, OTHER_EPOCHS
from paceline.cli.launch import spare_gpus
from paceline.cli.speak import plain_errors, say
from paceline.compare.contestants import Contestant, InLab, Local, compete, of_script, of_setting
from paceline.compare.page import page
from paceline.compare.rows import Row, rows, terminal_table
from paceline.compare.settings import DEFAULTS, SETTINGS
from paceline.compare.trial import Trial, read_trial
from paceline.errors import SettingError
from paceline.identity import versions
from paceline.lab.file import find_cluster, read_cluster
from paceline.lab.tools import check_needs
from paceline.tasks.train import BATCH

__all__ = ["compare"]

TARGETS = {"digits": 0.95, "fashion-mnist": 0.85}
WORKERS = 2
GRACE = 300.0  # seconds for all but training, where that is measured in seconds: imports, evaluations, parting
LIMIT = 1800.0


def compare(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SETTING]...", help=f"Of {', '.join(SETTINGS)}; by default {', '.join(DEFAULTS)}."),
    ] = None,
    script: Annotated[
        list[str] | None,
        typer.Option(
            help="A script of your own with its arguments, in quotes; `{folder}` and `{seed}` are replaced in it, and "
            "`--folder FOLDER` is added if there is no `{folder}`. As often as you like.",
            metavar="'train.py ARGS…'",
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help=f"What the settings train: {', '.join(tasks.names())}; by default digits.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-w", min=1, max=BATCH, help=f"On this machine; by default {WORKERS}.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="Train in the lab instead: a cluster file, or the name of an example. Needs root."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How often each trains, every time with another seed.")] = 3,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="How long the settings train; by default as `paceline demo` does.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="How long the settings train, by the clock instead.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="The accuracy to reach; by default 0.95 for digits, 0.85 for fashion-mnist."
        ),
    ] = None,
    limit: Annotated[
        float | None, typer.Option(min=1.0, help="Stop a training that has not ended after so many seconds; it failed.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A new or empty folder for records and report; by default runs/compare-DATE.")
    ] = None,
) -> None:
    """Train the same task under several settings, and compare them: a table here, and a report in one HTML file.

    One training after the other, all settings with the first seed, then all with the next. One that fails is a row
    that says so, and the exit code is 1 then. Ctrl-C ends the training that runs; the report tells of those before.

        paceline compare all-reduce local-sgd --task digits --workers 2 --epochs 5

        paceline compare all-reduce --script "train.py --rate 0.1 --seed {seed} --folder {folder}"
    """
    with plain_errors():
        folder = out or Path(time.strftime("runs/compare-%Y%m%d-%H%M%S"))
        settings = settings or ([] if script else list(DEFAULTS))
        task = _task(task, settings, epochs, seconds)
        unit, much = ("seconds", seconds) if seconds else ("epochs", epochs or EPOCHS.get(task, OTHER_EPOCHS))
        field = [of_setting(name, task, [f"--{unit}", str(much)]) for name in settings]
        field += [of_script(text, number) for number, text in enumerate(script or [], start=1)]
        _check_field(field, seeds)
        place = _place(workers, cluster)
        target = TARGETS.get(task) if target is None and settings else target
        limit = limit or (seconds + GRACE if seconds and not script else LIMIT)
        _make(folder)
        trials, stopped = _train(field, seeds, place, folder, limit)
    found = rows({one.label: one.title for one in field}, trials)
    facts = {
        "task": task if settings else "own scripts",
        "length": f"{much:g} {unit}" if settings else "as the scripts have it",
        "place": f"{place.workers} workers of one machine" if isinstance(place, Local) else f"the lab, {place.cluster}",
        "seeds": str(seeds),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "made": time.strftime("%Y-%m-%d %H:%M"),
    }
    _show(found, facts, target, folder)
    raise typer.Exit(130 if stopped else 1 if any(row.errors for row in found) else 0)


def _task(task: str | None, settings: Sequence[str], epochs: int | None, seconds: float | None) -> str:
    if not settings:
        given = {"--task": task, "--epochs": epochs, "--seconds": seconds}
        for name, value in given.items():
            if value is not None:
                raise SettingError(
                    f"{name} ({value}) has no effect on scripts; write it into --script, or name a setting"
                )
        return "digits"
    if epochs and seconds:
        raise SettingError(f"--epochs ({epochs}) and --seconds ({seconds:g}) exclude each other; leave one out")
    tasks.load(task or "digits")  # what is wrong with it is told once, here, and not by every training
    return task or "digits"


def _check_field(field: Sequence[Contestant], seeds: int) -> None:
    labels = [one.label for one in field]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise SettingError(f"{', '.join(sorted(twice))} was named more than once; for several trainings, use --seeds")
    for one in field:
        if seeds > 1 and not one.takes_seed:
            say(f"{one.title}: nothing in it says {{seed}}, so that its {seeds} trainings have the same one", "yellow")


def _place(workers: int | None, cluster: str | None) -> Local | InLab:
    if cluster is None:
        spare_gpus(workers or WORKERS)
        return Local(workers or WORKERS)
    if workers is not None:
        raise SettingError(f"--workers ({workers}) has no effect with --cluster: {cluster} says how many there are")
    read_cluster(find_cluster(cluster))
    check_needs()
    return InLab(cluster)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        full = any(folder.iterdir())
    except OSError as error:
        raise SettingError(f"--out ({folder}) cannot be used ({error}); give another folder") from error
    if full:
        raise SettingError(f"--out ({folder}) is not empty, and nothing is resumed; give a new folder")


def _train(
    field: Sequence[Contestant], seeds: int, place: Local | InLab, folder: Path, limit: float
) -> tuple[list[Trial], bool]:
    """All trainings that there was time for, and whether somebody stopped them."""
    trials: list[Trial] = []
    with _stops():
        try:
            for seed in range(seeds):
                for one in field:
                    say(f"{len(trials) + 1} of {seeds * len(field)}: {one.title}, seed {seed}")
                    here = (folder / one.label.replace(" ", "-") / f"seed-{seed}").resolve()
                    error = compete(one, seed, place, here, limit)
                    trials.append(read_trial(here, one.label, seed, error))
                    _tell(trials[-1])
        except KeyboardInterrupt:
            say("stopped; the report tells of the trainings before")
            return trials, True
    return trials, False


@contextmanager
def _stops() -> Iterator[None]:
    """SIGTERM is as good as Ctrl-C: what runs is ended, and what there is becomes a report."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(trial: Trial) -> None:
    if trial.error is not None:
        say(f"failed: {trial.error}", "red")
    else:
        told = "no accuracy recorded" if trial.accuracy is None else f"accuracy {trial.accuracy:.1%}"
        say(f"{told} after {trial.seconds:.1f} s of training")


def _title(found: Sequence[Row], task: str) -> str:
    names = ", ".join(row.label for row in found) or "nothing has trained"
    return f"{task}: {names if len(found) < 4 else f'{len(found)} settings'}"


def _show(found: Sequence[Row], facts: dict[str, str], target: float | None, folder: Path) -> None:
    screen = Console(highlight=False, emoji=False, markup=False)
    if not screen.is_terminal:  # a file or a pipe has no width, but the table needs some
        screen = Console(highlight=False, emoji=False, markup=False, width=140)
    screen.print(terminal_table(found, target))
    report = folder / "report.html"
    # A file name may hold what is no letter.
    text = page(_title(found, facts["task"]), facts, found, target).encode("utf-8", errors="replace")
    try:
        report.write_bytes(text)
    except OSError as error:
        say(f"the report {report} cannot be written: {error.strerror}", "red")
        raise typer.Exit(1) from error
    screen.print(f"\nThe report: {report}", soft_wrap=True)
