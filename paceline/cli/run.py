"""``paceline run``: a script in many workers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.independent import RESTARTS, launch_independent
from paceline.cli.launch import Machines, default_workers, launch
from paceline.cli.speak import plain_errors, say
from paceline.errors import SettingError

__all__ = ["run"]


def run(
    script: Annotated[str, typer.Argument(help="The training script, or the name of a module with -m.")],
    args: Annotated[list[str] | None, typer.Argument(help="Handed to the script.")] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")] = False,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-w", help="Workers on this machine; by default one for each GPU, or for each core."),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            help="How often to start all workers again when one fails; none by default. With --independent, how often "
            f"each is started again; {RESTARTS} times by default.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(help="How many machines train together.")] = 1,
    node_rank: Annotated[int, typer.Option(help="Which of them this is: 0 for the first.")] = 0,
    at: Annotated[
        str | None, typer.Option(help="Where they meet: a free port of machine 0.", metavar="HOST:PORT")
    ] = None,
    independent: Annotated[
        bool, typer.Option("--independent", help="For sync.Gossip: who fails is started again alone; the others go on.")
    ] = False,
    invitation: Annotated[
        Path | None,
        typer.Option(
            help="With --independent: where to keep the key and the addresses by which a worker comes back; by default "
            "a temporary file.",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a training script in many workers, as torchrun does.

    Every worker runs the whole script; `paceline.Run` in it finds the others. Ctrl-C lets all workers finish the
    step, save a checkpoint if the run has one, and end. The exit code is that of the worker that failed first.

    Four workers on this machine:

        paceline run --workers 4 train.py --learning-rate 0.1

    Two machines, this command on the first, and on the second with `--node-rank 1`:

        paceline run --nodes 2 --node-rank 0 --at 10.0.0.1:29500 train.py

    Workers under `sync.Gossip` that survive each other:

        paceline run --independent --workers 4 train.py
    """
    with plain_errors():
        if not module and not Path(script).exists():
            raise SettingError(f"there is no script {script}; give the path of a Python file, or -m and a module")
        if invitation is not None and not independent:
            raise SettingError(f"--invitation ({invitation}) has no effect without --independent; leave it out")
        given = {"--workers": workers, "-w": workers, "--restarts": restarts, "--at": at, "--invitation": invitation}
        given |= {"--nodes": nodes > 1 or None, "--node-rank": node_rank or None, "--independent": independent or None}
        _mind_place(script, args or [], [name for name, value in given.items() if value is None])
        command = ["-m", script, *(args or [])] if module else [script, *(args or [])]
        workers, machines = default_workers() if workers is None else workers, Machines(nodes, node_rank, at)
        if independent:
            times = RESTARTS if restarts is None else restarts
            code = launch_independent(
                command, workers=workers, machines=machines, restarts=times, invitation=invitation
            )
        else:
            code = launch(command, workers=workers, machines=machines, restarts=restarts or 0)
    raise typer.Exit(code)


def _mind_place(script: str, args: Sequence[str], names: Sequence[str]) -> None:
    """Tell who has put options of the launcher behind the script, which gets them; it may have some of these names."""
    found = [arg for arg in args if arg.partition("=")[0] in names or ("-w" in names and re.fullmatch(r"-w\d+", arg))]
    if found:
        verb = "are" if len(found) > 1 else "is"
        say(f"{', '.join(found)} {verb} behind {script}, so the script gets it; for paceline run it has to be before")
