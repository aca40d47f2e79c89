"""What went wrong in which worker: one cause, and a few words about the rest."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline.cli.worker import CONSEQUENCES

__all__ = ["Failure", "cause", "ending", "explain", "failures", "shell_code"]

EXITS = ("SystemExit", "Interrupted")  # no errors: the exit code says it all
LONGEST = 500  # characters of one worker's error


@dataclass(frozen=True)
class Failure:
    """How one worker ended."""

    rank: int
    code: int
    """Exit code; minus the number of the signal for a process that was killed."""
    time: float
    """Seconds since 1970: of its error, or else when the launcher noticed."""
    kind: str = ""
    """The class of the error that ended it; empty if it left none."""
    message: str = ""
    ended_by_launcher: bool = False
    """Whether it still ran when another one failed, and had to be told to end."""

    @property
    def follows(self) -> bool:
        """Whether it only ended because another worker did."""
        return self.kind in CONSEQUENCES or (self.ended_by_launcher and not self.kind)


def failures(found: Mapping[int, ProcessFailure], ended_by_launcher: Collection[int]) -> list[Failure]:
    """What torch's launcher found, with what the workers left in their error files; the second are process ids."""
    return [_failure(rank, one, one.pid in ended_by_launcher) for rank, one in found.items()]


def _failure(rank: int, found: ProcessFailure, ended_by_launcher: bool) -> Failure:
    left = found.error_file_data["message"]  # a text of torch's if there is no file
    message = str(left["message"]) if isinstance(left, dict) else ""
    seconds = float(left["extraInfo"]["timestamp"]) if isinstance(left, dict) else float(found.timestamp)
    kind = message.partition(":")[0]
    if kind in EXITS:
        kind = message = ""
    return Failure(rank, found.exitcode, seconds, kind, message, ended_by_launcher)


def cause(all: Sequence[Failure]) -> Failure:
    """The failure that the others follow from: the earliest that is not itself the consequence of another.

    Where all are, as with a frozen worker, the earliest that has an error to show.
    """
    return min(all, key=lambda one: (one.follows, one.follows and not one.kind, one.time))


def shell_code(code: int) -> int:
    """An exit code as shells give it: 128 and the number of the signal for a killed process."""
    return 128 - code if code < 0 else code


def explain(all: Sequence[Failure]) -> list[str]:
    """Lines for people: the cause first, then what else is worth knowing."""
    first = cause(all)
    rest = sorted((one for one in all if one is not first), key=lambda one: one.rank)
    # Errors of the same kind that follow from another worker's differ in their words and say the same.
    same = [one for one in rest if (one.kind, one.code) == (first.kind, first.code) and _alike(one, first)]
    lost = [one for one in rest if one.kind in CONSEQUENCES and one not in same]
    ended = [one for one in rest if one.follows and one not in (*same, *lost)]
    lines = [f"{_ranks([first, *same])} {ending(first)}"]
    lines += [f"rank {one.rank} {ending(one)}" for one in rest if one not in (*same, *lost, *ended)]
    if lost:
        lines.append(f"{_ranks(lost)} stopped because of that: {_short(lost[0].message)}")
    if ended:
        lines.append(f"{_ranks(ended)} still ran, and had to be ended")
    return lines


def _alike(one: Failure, other: Failure) -> bool:
    return one.follows if other.follows else one.message == other.message and not one.follows


def ending(one: Failure) -> str:
    """How a worker ended, for people: what follows its name."""
    if one.kind:
        return f"failed (exit code {shell_code(one.code)}): {_short(one.message)}"
    if one.code == -signal.SIGKILL:
        return "killed by SIGKILL; if nobody did that, the machine ran out of memory: see dmesg"
    if one.code < 0:
        return f"ended by {_name(-one.code)}"
    if one.code - 128 in (signal.SIGINT, signal.SIGTERM):
        return f"stopped by {_name(one.code - 128)}"
    return f"ended with exit code {one.code}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ranks(some: Sequence[Failure]) -> str:
    return ("rank " if len(some) == 1 else "ranks ") + ", ".join(map(str, sorted(one.rank for one in some)))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
