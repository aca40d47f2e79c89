"""``paceline lab``: a real cluster on this machine, with slow links and slow processors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli.speak import plain_errors, say
from paceline.errors import SettingError
from paceline.lab.file import example_files, find_cluster, read_cluster
from paceline.lab.lab import Lab, check_command
from paceline.lab.measure import measure_cpu, measure_links
from paceline.lab.remains import clean as remove_remains
from paceline.lab.remains import only_lab
from paceline.lab.report import check_table, event_table, worker_table
from paceline.lab.runner import run_workers
from paceline.lab.tools import check_needs

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="A real cluster on this machine: slow links, slow processors, faults.")

ClusterFile = Annotated[
    str, typer.Argument(metavar="CLUSTER", help=f"A cluster file, or an example: {', '.join(example_files())}.")
]


@app.command()
def run(
    cluster: ClusterFile,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND …", help="What every worker runs.")],
    out: Annotated[
        Path | None, typer.Option(help="A folder for lab.json (all numbers) and the output of each worker.")
    ] = None,
    limit: Annotated[
        float | None, typer.Option(min=0.1, help="Kill all workers that still run after so many seconds.")
    ] = None,
) -> None:
    """Run a command once for each worker of a cluster, each in a network and with a processor of its own.

    `paceline lab run slow -- python train.py` starts `train.py` with the variables that torchrun would set. The exit
    code is that of the worker that failed first.
    """
    with plain_errors():
        path = find_cluster(cluster)
        described = read_cluster(path)
        check_command(command)
        if out is not None:
            _check_folder(out)
        with Lab(described, path.stem) as lab:
            width = max(len(worker.name) for worker in described.workers)
            report = run_workers(
                *(lab, command),
                show=lambda name, line: _print(f"{name:{width}s} | {line}"),
                folder=out,
                limit=limit,
                name=path.stem,
            )
    screen = _wide_screen(stderr=True)
    screen.print(worker_table(report, described))
    if report.events:
        screen.print(event_table(report.events))
    raise typer.Exit(report.exit)


@app.command()
def check(cluster: ClusterFile) -> None:
    """Build a cluster and measure what it really gives, beside what the file asks for; its events do not happen.

    Rates are those of whole frames; a program can send about 95 percent of it. A link that is off by more than 10
    percent is measured again, up to three times in all. The exit code is 1 if anything is still off; then see what
    else runs on this machine.
    """
    with plain_errors():
        path = find_cluster(cluster)
        described = read_cluster(path)
        screen = _wide_screen()
        with Lab(described, path.stem) as lab:
            with screen.status("measuring processors"):
                found = measure_cpu(lab)
            for measured in measure_links(lab):
                found.append(measured)
                if screen.is_terminal:
                    screen.print(f"{measured.name} {measured.what} …", end="\r")
    screen.print(check_table(found))
    off = [f"{each.name} {each.what} ({each.ratio:.2f})" for each in found if not each.good]
    if off:
        say(f"off by more than 10 %: {', '.join(off)}; see what else runs on this machine", "red")
    raise typer.Exit(1 if off else 0)


@app.command()
def clean() -> None:
    """Remove what a lab that was killed has left: processes, namespaces, links and control groups."""
    with plain_errors():
        check_needs()
        with only_lab("clean"):
            found = remove_remains()
        say(f"removed {len(found)}: {', '.join(found)}" if found else "nothing is left of any lab")


def _wide_screen(stderr: bool = False) -> Console:
    """A file or a pipe has no width, but the tables need some."""
    screen = Console(stderr=stderr, highlight=False)
    return screen if screen.is_terminal else Console(stderr=stderr, highlight=False, width=140)


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"--out ({folder}) cannot be made: {error}") from None


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
