"""The command line: ``paceline run``, ``demo``, ``compare``, ``lab``, ``probe`` and ``doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli import compare, demo, doctor, lab, probe, run
from paceline.identity import versions

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        ours, *theirs = (f"{name} {version}" for name, version in versions().items())
        typer.echo(f"{ours} ({', '.join(theirs)})")
        raise typer.Exit


@app.callback(epilog="New here? Begin with `paceline doctor`, then `paceline demo`.")
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Tell the version and leave.")
    ] = False,
) -> None:
    """Train PyTorch models with many workers, on clusters as they really are."""


# Everything behind the script belongs to the script, even if it looks like an option of ours.
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(run.run)
app.command()(demo.demo)
app.command()(compare.compare)
app.command()(probe.probe)
app.command()(doctor.doctor)
app.add_typer(lab.app, name="lab")
