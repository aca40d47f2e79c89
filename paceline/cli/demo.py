"""``paceline demo``: a built-in task, trained by several workers of this machine."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from paceline import record, tasks
from paceline.cli.launch import launch, spare_gpus
from paceline.cli.speak import plain_errors, say
from paceline.errors import SettingError
from paceline.identity import versions
from paceline.record import Summary
from paceline.tasks.train import BATCH

__all__ = ["demo"]

EPOCHS = {"digits": 20}  # enough for 97 %; of the larger tasks, a few show that it works
OTHER_EPOCHS = 3

CHANGES = """\
  + import paceline as pl
  + torch.manual_seed(0)  # before the model is made
  + run = pl.Run(model, optimizer, dataset, batch=64)
  + for step in run.steps(epochs=10):
        optimizer.zero_grad()
  +     for x, y in step:
  +         step.backward(loss_function(model(x), y))
        optimizer.step()
"""


def demo(
    task: Annotated[str, typer.Option(help=f"What to train: {', '.join(tasks.names())}.")] = "digits",
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, max=BATCH, help="Worker processes.")] = 4,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Passes over the data; by default {EPOCHS['digits']} for digits, {OTHER_EPOCHS} for others."
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="For records and checkpoints, by default runs/demo-DATE; in that of an earlier demo, it goes on."
        ),
    ] = None,
) -> None:
    """Train a built-in task with several workers on this machine, and show where the time went.

    The script that runs is `paceline/tasks/train.py`, which is short and made to be read. Ctrl-C stops all
    workers together, with a checkpoint.
    """
    epochs = epochs or EPOCHS.get(task, OTHER_EPOCHS)
    folder = folder or Path(time.strftime("runs/demo-%Y%m%d-%H%M%S"))
    with plain_errors():
        tasks.load(task)  # what is wrong with the task is told once, here, and not by every worker
        _prepare(folder, task)
        spare_gpus(workers)
        say(f"{task}, {workers} workers, {epochs} epochs, into {folder}")
        target = ["-m", "paceline.tasks.train", "--task", task, "--epochs", str(epochs), "--folder", str(folder)]
        code = launch(target, workers=workers)
        events = folder / "events.jsonl"
        if not events.exists():
            raise typer.Exit(code)
        summary = record.summary(record.read(events))
    result = {"task": task, "epochs": epochs, **msgspec.to_builtins(summary), "versions": versions()}
    result["examples_per_second"] = summary.examples_per_second
    (folder / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    _show(summary, task, folder, workers, epochs, code)
    raise typer.Exit(code)


def _prepare(folder: Path, task: str) -> None:
    """Make the folder, or see that what is in it can go on."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        earlier: Any = msgspec.json.decode((folder / "result.json").read_bytes())
    except FileNotFoundError:
        return
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingError(f"the folder {folder} cannot be used ({error}); give another --folder") from error
    if earlier.get("task") != task:
        raise SettingError(f"{folder} holds a demo of {earlier.get('task')}, not of {task}; give another --folder")


def _show(summary: Summary, task: str, folder: Path, workers: int, epochs: int, code: int) -> None:
    """The result and what to do with it, on standard output."""
    screen = Console(highlight=False, emoji=False, markup=False)
    screen.print()
    screen.print(record.table(summary))
    again = f"paceline demo --task {task} -w {workers} --folder {folder}"
    if code:
        screen.print(f"\nThe run did not reach its end. To go on:\n  {again} --epochs {epochs}")
        return
    accuracy = summary.measured.get("test_accuracy", float("nan"))
    screen.print(Text(f"\nTest accuracy {accuracy:.1%}", style="bold green"))
    screen.print(f"\nEverything is in {folder}:", soft_wrap=True)
    for name, use in {
        "trace.json": "what every worker did when: open it at https://ui.perfetto.dev",
        "tensorboard": f"curves: tensorboard --logdir {folder / 'tensorboard'}",
        "checkpoints": f"to train longer: {again} --epochs {2 * epochs}",
        "events.jsonl": "every step, one line of JSON each",
        "result.json": "this table",
    }.items():
        if (folder / name).exists():
            screen.print(Text(f"  {name:<12}  ", style="bold").append(use, style="not bold"), soft_wrap=True)
    screen.print("\nYour own training script needs six new lines:\n")
    screen.print(CHANGES)
    screen.print(f"and is started with: paceline run --workers {workers} train.py")
    if entrance := how_to_enter():
        screen.print(f"\nThese commands are in the environment of this demo; to enter it: . {entrance}", soft_wrap=True)


def how_to_enter() -> str:
    """The script that brings ``paceline`` into the shell; empty if it is there already, or there is none."""
    script = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("paceline") or not script.exists():
        return ""
    return min(os.path.relpath(script), str(script), key=len)
