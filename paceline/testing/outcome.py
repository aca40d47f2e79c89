"""What became of a group of workers, and checks of it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import SettingError

__all__ = ["Ending", "Outcome"]

LINES = 40  # of each worker's output in a message


@dataclass(frozen=True)
class Ending:
    """How one worker ended."""

    worker: int
    code: int | None
    """Its exit code, or minus the number of the signal that ended it; None if it ran until the group was ended."""
    output: str
    """What it wrote, errors included."""
    seconds: float
    """When it ended, since the start of the group."""
    seconds_after_fault: float | None
    """When it ended, since the last fault of the group; None if there was none before."""
    faults: tuple[str, ...] = ()
    """What was done to it."""
    digest: str | None = None
    """What it told of its model."""

    def __str__(self) -> str:
        how = "ran until the group was ended" if self.code is None else f"ended with code {self.code}"
        when = f"after {self.seconds:.1f} s"
        if self.seconds_after_fault is not None:
            when += f", {self.seconds_after_fault:.1f} s after the fault"
        met = f" [{'; '.join(self.faults)}]" if self.faults else ""
        return f"worker {self.worker}{met} {how} {when}"


@dataclass(frozen=True)
class Outcome:
    """What became of all workers of a group."""

    endings: tuple[Ending, ...]
    """One for each worker, by rank."""

    @property
    def survivors(self) -> tuple[int, ...]:
        """The workers that ended well, with exit code 0."""
        return tuple(each.worker for each in self.endings if each.code == 0)

    @property
    def others(self) -> tuple[Ending, ...]:
        """The endings of the workers to which nothing was done."""
        return tuple(each for each in self.endings if not each.faults)

    def __str__(self) -> str:
        told = [str(each) for each in self.endings]
        for each in self.endings:
            lines = each.output.splitlines()
            left_out = f" (the last {LINES} of {len(lines)} lines)" if len(lines) > LINES else ""
            told += [
                f"--- worker {each.worker} wrote{left_out}:" if lines else f"--- worker {each.worker} wrote nothing"
            ]
            told += lines[-LINES:]
        return "\n".join(told)

    def check_detected(self, *, within: float, error: str | None = None, says: str | None = None) -> None:
        """Every worker to which nothing was done ended soon after the fault, with an error.

        ``within`` is in seconds; ``error`` the name of the exception, ``says`` a regular expression: both have to be in
        what each of them wrote.
        """
        __tracebackhide__ = True
        if not any(each.faults for each in self.endings):
            raise SettingError("there was no fault to detect; declare one: group.at(step=…, worker=…).kill()")
        if not self.others:
            raise SettingError("every worker has met with a fault, so that none is left that could detect one")
        wrong = [f"worker {each.worker} {why}" for each in self.others for why in _missed(each, within, error, says)]
        self._fail_if(wrong)

    def check_survivors(self, workers: Sequence[int]) -> None:
        """These workers, and no others, ended with exit code 0."""
        __tracebackhide__ = True
        wrong = [f"worker {one} did not end with code 0" for one in workers if one not in self.survivors]
        wrong += [f"worker {one} ended with code 0" for one in self.survivors if one not in workers]
        self._fail_if(wrong)

    def check_same_digest(self, *others: Outcome) -> None:
        """All workers that ended well have told a digest, and all digests are equal, also to those of ``others``."""
        __tracebackhide__ = True
        by_digest: defaultdict[str, list[str]] = defaultdict(list)
        wrong: list[str] = []
        for number, outcome in enumerate((self, *others)):
            where = f" of other outcome {number}" if number else ""
            for each in outcome.endings:
                if each.digest is not None:
                    by_digest[each.digest].append(f"worker {each.worker}{where}")
                elif each.code == 0:
                    wrong.append(f"worker {each.worker}{where} has told no digest; let it call tell_digest(model)")
            if not any(each.digest for each in outcome.endings):
                wrong.append(f"no worker{where} has told a digest; let them call tell_digest(model)")
        if len(by_digest) > 1:
            wrong += [f"the digest of {', '.join(whose)} is {found[:12]}…" for found, whose in by_digest.items()]
        self._fail_if(wrong)

    def _fail_if(self, wrong: list[str]) -> None:
        __tracebackhide__ = True
        if wrong:
            raise AssertionError("\n".join([*wrong, "", str(self)]))


def _missed(each: Ending, within: float, error: str | None, says: str | None) -> list[str]:
    if each.code is None:
        return ["did not end by itself"]
    if each.seconds_after_fault is None:
        return ["ended before the fault"]
    checks: list[tuple[bool, Callable[[], str]]] = [
        (each.code != 0, lambda: "ended with code 0, as if nothing had happened"),
        (each.seconds_after_fault <= within, lambda: f"ended {each.seconds_after_fault:.1f} s after the fault"),
        (error is None or bool(re.search(rf"\b{error}\b", each.output)), lambda: f"did not write {error}"),
        (says is None or bool(re.search(says, each.output)), lambda: f"wrote nothing like {says!r}"),
    ]
    return [why() for good, why in checks if not good]
