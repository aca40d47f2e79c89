"""``paceline probe``: what a cluster can do, and which method is the one for it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from paceline import tasks
from paceline.balance.even import Even
from paceline.balance.solver import finish
from paceline.cli.launch import default_workers, launch
from paceline.cli.speak import plain_errors, say
from paceline.errors import SettingError
from paceline.lab.file import example_files, find_cluster, read_cluster
from paceline.lab.lab import Lab
from paceline.lab.runner import run_workers
from paceline.survey.predict import Forecast, Survey, forecasts, recommend

__all__ = ["probe"]

GRACE = 600.0  # seconds beyond the measuring: slow workers load data, and sums over slow links are seen several times


def probe(
    task: Annotated[str, typer.Option(help=f"What is to be trained: {', '.join(tasks.names())}.")] = "digits",
    model: Annotated[str | None, typer.Option(help="Which model of the task; its first by default.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Examples of a step, all workers together.")] = 64,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-w", min=1, help="Workers on this machine; by default one for each GPU, or core."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help=f"Build this cluster and measure it: a file, or an example: {', '.join(example_files())}."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to measure, about.")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="A file for all numbers, as JSON.")] = None,
) -> None:
    """Measure a cluster, and recommend a method by what an epoch will take.

    All workers compute at once with several batches, average, and exchange messages. For machines of your own, and for
    a model of your own, see docs/survey.md.
    """
    with plain_errors():
        if cluster is not None and workers is not None:
            raise SettingError(f"--workers ({workers}) has no effect with --cluster, which says how many there are")
        if out is not None:
            _check_writable(out)
        tasks.load(task).model(model)  # what is wrong with them is told once, here, and not by every worker
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            file = Path(folder) / "found.json"
            command = ["-m", "paceline.survey.task", "--task", task, "--batch", str(batch), "--seconds", str(seconds)]
            command += ["--out", str(file), *(["--model", model] if model else [])]
            say(f"measuring for about {seconds:g} s")
            code = _measure(command, workers, cluster, seconds + GRACE)
            if code or not file.exists():
                raise typer.Exit(code or 1)
            survey = msgspec.json.decode(file.read_bytes(), type=Survey)
        _show(survey)
        if out is not None:
            found = forecasts(survey)
            told = {
                "recommended": recommend(found).name,
                "forecasts": [each._asdict() for each in found],
                "survey": survey,
            }
            out.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n")


def _check_writable(out: Path) -> None:
    """Now, and not after a minute of measuring."""
    try:
        new = not out.exists()
        out.touch()
        if new:
            out.unlink()
    except OSError as error:
        raise SettingError(f"--out ({out}) cannot be written: {error.strerror}") from error


def _measure(command: list[str], workers: int | None, cluster: str | None, limit: float) -> int:
    """Let all workers measure; gives the exit code."""
    if cluster is None:
        return launch(command, workers=workers or default_workers())
    path = find_cluster(cluster)
    described = read_cluster(path)
    with Lab(described, path.stem) as lab:
        report = run_workers(
            lab, [sys.executable, *command], show=lambda name, line: say(f"{name}: {line}"), limit=limit
        )
    return report.exit


def _show(survey: Survey) -> None:
    screen = Console(highlight=False, emoji=False, markup=False)
    screen.print()
    screen.print(_workers(survey))
    if survey.links:
        slowest = min(survey.links, key=lambda link: link.bytes_per_second)
        fastest = max(survey.links, key=lambda link: link.bytes_per_second)
        screen.print(
            f"\nLinks: {decimal(int(slowest.bytes_per_second))}/s (workers {slowest.one} and {slowest.other}) to "
            f"{decimal(int(fastest.bytes_per_second))}/s each way, a short message {1e3 * slowest.seconds:.2g} ms. An "
            f"average of the model ({decimal(survey.model_bytes)}) takes {survey.sum_seconds:.3g} s, in 8 bits "
            f"{survey.coded_seconds:.3g} s."
        )
    found = forecasts(survey)
    best = recommend(found)
    screen.print()
    screen.print(_table(found, best))
    screen.print(f"\nTake {best.name}: {best.why}.\n  {best.what}")
    screen.print(
        "\nThat is time, not accuracy: after an epoch of all-reduce or balance the model is that of one process, after "
        "one of the others somewhat worse, depending on the task. So compare accuracies, too: see docs/survey.md."
    )


def _workers(survey: Survey) -> Table:
    table = Table("worker", "examples/s", "ms for a step", "each example", title="What each worker computes")
    shares = Even().split(survey.batch, len(survey.speeds))
    for rank, (speed, share) in enumerate(zip(survey.speeds, shares, strict=True)):
        seconds = finish(speed, share)
        fixed, each = f"{1e3 * seconds:.3g} with {share}", f"{1e3 * speed.per_example:.2g} ms"
        table.add_row(str(rank), f"{share / seconds:,.0f}", fixed, each)
    return table


def _table(found: list[Forecast], best: Forecast) -> Table:
    table = Table("method", "an epoch", "all-reduce is 1", "", title="Forecast")
    for each in found:
        mark = "recommended" if each is best else ""
        table.add_row(each.name, f"{each.seconds:.3g} s", f"{each.seconds / found[0].seconds:.2f}", mark)
    return table
