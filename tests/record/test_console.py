from __future__ import annotations

import io
import math
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from paceline import record
from paceline.events import Ended, Event, Measured, Remark, Resumed, Saved
from paceline.record.console import Way, way
from paceline.records import Progress

from .fake import START, gossiped, one_of_each, started, step


def plain(*events: Event) -> list[str]:
    stream = io.StringIO()
    console = record.Console(stream)
    for event in events:
        console.record(event)
    console.close()
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (None, None),
        (Progress(), None),
        (Progress(epoch=3), Way(128, 1920, "examples")),
        (Progress(examples=1000), Way(128, 1000, "examples")),
        (Progress(step=8), Way(2, 8, "steps")),
    ],
)
def test_the_way_to_the_target(target: Progress | None, expected: Way | None) -> None:
    assert way(target, 640, step(1)) == expected


def test_plain_lines_where_there_is_no_terminal() -> None:
    lines = plain(
        started(target=Progress(step=8)),
        step(0, seconds=2.0, wait=(0.0, 1.0), time=START + 2),
        step(1, seconds=2.0, wait=(0.0, 1.0), time=START + 4),
        step(2, seconds=2.0, wait=(0.0, 1.0), time=START + 6),
        step(3, seconds=2.0, wait=(0.0, 1.0), time=START + 8),
        Measured(START + 9, 4, {"accuracy": 0.875, "größe [m]": 1234567.0}),
        Remark(START + 9, 4, "worker 1 is slow"),
        Saved(START + 9, 4, "run/checkpoint", 1000, 0.25),
        Ended(START + 10, 4, 256, "stopped"),
    )
    assert lines == [
        "2 workers, 1,000 parameters, 640 examples",
        "epoch 1  step 1  loss 0.5  32 examples/s  batch 64 (48 + 16)  waiting 25%  efficiency 80%  "
        "12% done  0:00:14 left",
        # Five seconds later at the earliest.
        "epoch 1  step 4  loss 0.5  32 examples/s  batch 64 (48 + 16)  waiting 25%  efficiency 80%  "
        "50% done  0:00:08 left",
        "step 4: accuracy 0.875  größe [m] 1.23457e+06",
        "step 4: worker 1 is slow",
        "step 4: saved run/checkpoint (0.2 s)",
        "stopped: 4 steps, 256 examples in 0:00:10 (32/s), loss 0.5, waiting 25%",
    ]


def test_what_was_exchanged_since_the_last_line() -> None:
    lines = plain(
        *(gossiped(), step(0, time=START)),
        *(gossiped(), step(1, time=START + 1), gossiped(), step(2, time=START + 5.5)),
        step(3, time=START + 11),
        Ended(START + 12, 4, 256, "done"),
    )
    rest = "last with 3  0.25 apart  8 bits"
    assert lines[0].endswith(
        f"efficiency 80%  4 of 5 members  3 exchanges  1 refused  {rest} (1 wider)  4.0 kB sent  by numba"
    )
    assert lines[1].endswith(
        f"efficiency 80%  4 of 5 members  6 exchanges  2 refused  {rest} (2 wider)  8.0 kB sent  by numba"
    )
    assert lines[2].endswith("efficiency 80%")  # nothing was told of since
    assert lines[3].endswith(
        f"waiting 10%; 4 of 5 members  9 exchanges  3 refused  {rest} (3 wider)  12.0 kB sent  by numba"
    )


def test_the_time_left_follows_examples_where_they_are_the_target() -> None:
    # 128 of 1280 examples are done; the speed is a mean in which the last step counts most.
    [_, _, line] = plain(
        started(target=Progress(epoch=2)),
        step(0, seconds=1.0, time=START + 1),
        step(1, seconds=1.0, time=START + 10),
    )
    assert line.endswith("10% done  0:00:18 left")
    assert line.startswith("epoch 1/2  step 2  ")


def test_under_gossip_the_time_left_follows_the_examples_of_all() -> None:
    """This worker does 64 in a second, and all of them 256."""
    lines = plain(
        *(started(target=Progress(examples=2560)), gossiped()),
        *(step(number, seconds=1.0, time=START + 6 * number, examples=1536 * number) for number in range(2)),
    )
    assert "  0% done  ? left" in lines[1]
    assert "  60% done  0:00:04 left" in lines[2]


def test_the_loss_is_smooth_but_a_broken_one_is_seen() -> None:
    losses = [1.0, 0.0, math.nan, 0.0]
    lines = plain(*[step(n, loss=loss, time=START + 10 * n) for n, loss in enumerate(losses)])
    shown = [line.split("loss ")[1].split("  ")[0] for line in lines]
    # Weights fade by 0.95 a step: 0.95 / 1.95 after two; a NaN is shown once and does not stay.
    assert shown == ["1", "0.4872", "nan", f"{0.95**2 / (0.95**2 + 0.95 + 1):.4g}"]


def test_a_clock_that_was_set_back_does_not_freeze_the_display() -> None:
    assert len(plain(step(0, time=START), step(1, time=START - 3600), step(2, time=START - 3594))) == 3


def test_every_event_is_taken_without_a_word_before() -> None:
    for event in one_of_each():
        plain(event)


def test_a_second_loop_begins_anew() -> None:
    first = [started(target=Progress(step=1)), step(0, loss=8.0, seconds=1.0), Ended(START + 1, 1, 64, "done")]
    later = started(target=Progress(step=2), time=START + 60)
    lines = plain(*first, later, step(1, loss=2.0, time=START + 61), Ended(START + 62, 2, 128, "done"))
    assert lines[-1] == "done: 2 steps, 128 examples in 0:00:02 (6,400/s), loss 2, waiting 10%"


def test_a_stream_that_breaks_warns_once_and_the_run_goes_on() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = os.fdopen(write_end, "w", buffering=1)
    console = record.Console(stream)
    with pytest.warns(RuntimeWarning, match="the display on the console cannot be written"):
        console.record(started())
    console.record(step(0))  # a second warning would be an error here
    console.close()
    with pytest.raises(BrokenPipeError):
        stream.close()


class Terminal:
    """A real terminal of 80 columns, and what was written to it."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (24, 80))
        self.stream = os.fdopen(self.slave, "w")
        self.before = termios.tcgetattr(self.slave)

    def output(self) -> str:
        """Everything so far. A mark is written and waited for, because a terminal may be slow to hand on."""
        self.stream.write("\x00")
        self.stream.flush()
        found = b""
        while not found.endswith(b"\x00"):
            found += os.read(self.master, 65536)
        return found[:-1].decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    yield terminal
    terminal.stream.close()
    os.close(terminal.master)


def test_a_live_display_on_a_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    console = record.Console(terminal.stream)
    console.record(started(target=Progress(step=10)))
    for number in range(5):
        console.record(step(number, seconds=0.25))
    shown = terminal.output()
    assert shown.count("loss 0.5") == 5  # each of them is 0.25 s after the one before
    assert "━" in shown
    assert "50% done  0:00:01 left" in shown
    assert sys.stdout is not terminal.stream  # what the program prints goes above the display

    console.record(Ended(START + 2, 5, 320, "done"))
    assert sys.stdout is terminal.stream
    end = terminal.output()
    assert "done: 5 steps, 320 examples in 0:00:02" in end
    console.close()
    console.close()
    assert terminal.output() == ""
    assert termios.tcgetattr(terminal.slave) == terminal.before
    assert_cursor_visible(shown + end)


def test_the_live_display_has_a_line_more_for_exchanges(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    console = record.Console(terminal.stream)
    for event in (gossiped(), step(0)):
        console.record(event)
    console.close()
    lines = terminal.output().splitlines()
    at = next(at for at, line in enumerate(lines) if "loss 0.5" in line)
    assert "4 of 5 members  3 exchanges  1 refused  last with 3" in lines[at + 1]


def assert_cursor_visible(output: str) -> None:
    assert output.rfind("\x1b[?25h") >= output.rfind("\x1b[?25l")


def test_the_live_display_is_redrawn_at_most_five_times_a_second(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal.stream)
    console = record.Console(terminal.stream)
    for number in range(65):
        console.record(step(number, seconds=1 / 64))  # exact in binary
    console.close()
    # At the first step, then every 13 steps (0.203 s): 0, 13, 26, 39, 52; closing draws the last state once more.
    steps = [line.split("step ")[1].split()[0] for line in terminal.output().splitlines() if "step " in line]
    assert list(dict.fromkeys(steps)) == ["1", "14", "27", "40", "53"]


def test_output_that_goes_to_a_file_stays_there(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    results = io.StringIO()
    monkeypatch.setattr(sys, "stdout", results)
    console = record.Console(terminal.stream)
    console.record(step(0))
    print("the result")
    console.close()
    assert results.getvalue() == "the result\n"
    assert "the result" not in terminal.output()


def test_plain_lines_where_the_output_goes_through_a_pipe(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end), os.fdopen(write_end, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        record.Console(terminal.stream).record(step(0))
    assert terminal.output().startswith("epoch 1  step 1  loss 0.5")


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = record.Console(terminal.stream)
    for event in one_of_each():
        console.record(event)
    console.close()
    output = terminal.output()
    assert "\x1b" not in output
    assert "epoch 1/3  step 1  loss 0.5" in output


@pytest.mark.parametrize("end", ["raise KeyError('lost')", "os.kill(os.getpid(), 9)"])
def test_the_terminal_is_whole_after_an_exception_and_even_a_kill(terminal: Terminal, end: str) -> None:
    program = f"""
import os
from paceline import record
from paceline.events import StepDone
console = record.Console()
console.record(StepDone(1.0, 0, 0, 64, 64, 0.5, 0.1, 1.0, [64], [0.1], [0.5], [0.0], 0.0, 0, True))
{end}
"""
    child = subprocess.run([sys.executable, "-c", program], stdout=terminal.slave, stderr=terminal.slave, check=False)
    assert child.returncode in (1, -9)
    output = terminal.output()
    assert "loss 0.5" in output
    if child.returncode == 1:
        assert "KeyError: 'lost'" in output
        assert output.removesuffix("\x1b[?25h").endswith("\n")  # the shell's prompt comes on a line of its own
    assert_cursor_visible(output)
    assert termios.tcgetattr(terminal.slave) == terminal.before


def test_resumed_is_said() -> None:
    assert plain(Resumed(START, 1200, "run/checkpoint", 4)) == ["resumed at step 1,200 from run/checkpoint"]
