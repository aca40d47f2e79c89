"""How the state of a run looks: as plain lines, or as a few lines of a terminal that are redrawn in place."""

from __future__ import annotations

import atexit
import math
import os
import stat
import sys
from typing import Protocol, TextIO

import msgspec
from rich.console import Console as Screen
from rich.live import Live
from rich.text import Text

from paceline.record.pace import duration

__all__ = ["Display", "Lines", "LiveDisplay", "Status", "display_for"]

MOST_SHARES = 8


class Status(msgspec.Struct, frozen=True):
    """The numbers that are shown."""

    step: int
    """Steps done."""
    epoch: int
    """The pass over the data, from 0."""
    epochs: int
    """How many passes there will be; 0 if that is not what ends the run."""
    loss: float
    examples_per_second: float
    batch: int
    waiting: float
    """Share of all workers' time."""
    efficiency: float
    """Examples per second over the sum of what the workers would do alone."""
    shares: tuple[int, ...]
    """Each worker's examples in the last step."""
    done: float | None
    """Part of the whole run, from 0 to 1; None if its end is not known."""
    seconds_left: float
    exchanges: str = ""
    """What was exchanged since the last status, where workers average in pairs."""

    def position(self) -> str:
        """Where the run is."""
        of = f"/{self.epochs}" if self.epochs else ""
        return f"epoch {self.epoch + 1}{of}  step {self.step:,}"

    def numbers(self) -> str:
        """How it goes."""
        return (
            f"loss {self.loss:.4g}  {self.examples_per_second:,.0f} examples/s  "
            f"batch {self.batch:,}{self._who()}  waiting {self.waiting:.0%}"
            + ("" if math.isnan(self.efficiency) else f"  efficiency {self.efficiency:.0%}")
        )

    def _who(self) -> str:
        """The shares, where they differ and there are not too many to show."""
        uneven = max(self.shares) - min(self.shares) > 1
        return f" ({' + '.join(map(str, self.shares))})" if uneven and len(self.shares) <= MOST_SHARES else ""

    def outlook(self) -> str:
        """How much is still to come; empty if that is not known."""
        if self.done is None:
            return ""
        return f"{math.floor(100 * self.done)}% done  {duration(self.seconds_left)} left"


class Display(Protocol):
    """Something that shows a status and lines of text."""

    every_seconds: float
    """How often it wants a new status at most."""

    def show(self, status: Status) -> None:
        """Show the present state."""

    def say(self, text: str, style: str = "") -> None:
        """Print a line that stays."""

    def stop(self, keep: bool) -> None:
        """Give the stream back, the last status still on it or not."""


def display_for(stream: TextIO) -> Display:
    """A live display for a terminal that can show it, plain lines for everything else.

    Also plain where standard output goes into a pipe: behind ``| tee`` another process writes to the same terminal,
    and its lines and a display that is redrawn would erase each other.
    """
    able = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return LiveDisplay(stream) if able and not _is_pipe(sys.stdout) else Lines(stream)


def _is_pipe(stream: TextIO) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # it is no file of the operating system
        return False


class Lines:
    """Plain lines without escape codes: for files, pipes and notebooks."""

    every_seconds = 5.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, status: Status) -> None:
        """Print the status in one line."""
        self.say("  ".join(filter(None, (status.position(), status.numbers(), status.outlook(), status.exchanges))))

    def say(self, text: str, style: str = "") -> None:
        """Print a line; the style is left out."""
        print(text, file=self._stream, flush=True)

    def stop(self, keep: bool) -> None:
        """Nothing to give back."""


class LiveDisplay:
    """Two lines at the bottom of a terminal, or three; whatever the program prints appears above them."""

    every_seconds = 0.2

    def __init__(self, stream: TextIO) -> None:
        self._screen = Screen(file=stream, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None

    def show(self, status: Status) -> None:
        """Redraw the lines."""
        if self._live is None:
            self._live = self._start()
        self._live.update(self._render(status), refresh=True)

    def say(self, text: str, style: str = "") -> None:
        """Print a line above them."""
        self._screen.print(text, style=style, soft_wrap=True)  # the terminal wraps: paths can be copied

    def stop(self, keep: bool) -> None:
        """Give back standard output and error, and leave the cursor below the last line."""
        if self._live is not None:
            atexit.unregister(self._stop_at_exit)
            live, self._live = self._live, None
            live.transient = not keep
            live.stop()

    def _start(self) -> Live:
        live = Live(
            console=self._screen,
            # Drawn by show(), not by a thread of its own: a data loader that forks its workers must not copy one.
            auto_refresh=False,
            # What goes to a file or a pipe must not land on the terminal.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        live.start()
        atexit.register(self._stop_at_exit)
        # rich hides the cursor. Left visible, not even a killed process leaves a terminal without one.
        self._screen.show_cursor(True)
        return live

    def _stop_at_exit(self) -> None:
        # An exception flew through the loop and nobody closed.
        self.stop(keep=True)

    def _render(self, status: Status) -> Text:
        # One Text, because rich needs twice as long to lay out a table or its own Progress.
        text = Text(status.position(), no_wrap=True, overflow="ellipsis")
        if status.done is not None:
            outlook = status.outlook()
            width = max(0, min(40, self._screen.width - len(text) - len(outlook) - 4))
            full = round(width * status.done)
            bar = "-" if self._screen.options.ascii_only else "━"
            text.append("  ").append(bar * full, "green").append(bar * (width - full), "bright_black")
            text.append(f"  {outlook}")
        text.append(f"\n{status.numbers()}", "bold")
        return text.append(f"\n{status.exchanges}") if status.exchanges else text
