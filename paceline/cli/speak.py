"""How the commands talk to people: on standard error, so that standard output stays the scripts' own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

from paceline.errors import PacelineError, SettingError

__all__ = ["plain_errors", "say", "screen", "stop"]

screen = Console(stderr=True, highlight=False, emoji=False)


def say(text: str, style: str = "") -> None:
    """Print a line that begins with who speaks; the text is no markup, and a terminal may wrap it."""
    screen.print(Text("paceline: ", style="bold").append(text, style), soft_wrap=True)


def stop(text: str, code: int) -> NoReturn:
    """Say what is wrong and leave with an exit code."""
    say(text, "red")
    raise typer.Exit(code)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn Paceline's own errors into their message alone: code 2 for a wrong argument, 1 for all others."""
    try:
        yield
    except SettingError as error:
        stop(str(error), 2)
    except PacelineError as error:
        stop(str(error), 1)
