"""What a process holds, whether it grows, and how long its training stood still: for the soak."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.events import Event, Started, StepDone

WARM_UP = 15.0  # seconds of a life that do not count for what grows


class Sample(NamedTuple):
    """What a process holds at a moment."""

    time: float
    megabytes: float
    descriptors: int
    sockets: int
    threads: int
    calm: bool
    """Whether all workers trained then."""


def look(process: int, calm: bool) -> Sample:
    """As the operating system sees it."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    held = [os.readlink(each) for each in Path(f"/proc/{process}/fd").iterdir()]
    sockets = sum(each.startswith("socket:") for each in held)
    return Sample(time.time(), int(status["VmRSS"].split()[0]) / 1024, len(held), sockets, int(status["Threads"]), calm)


class Growth(NamedTuple):
    """How much more there is in the last third of the time than in the first: medians."""

    megabytes: float
    descriptors: float
    sockets: float
    threads: float


def growth(samples: Sequence[Sample]) -> Growth | None:
    """Of one life after its beginning, while all were there; None if it was too short to say."""
    counted = [each for each in samples if each.calm and each.time > samples[0].time + WARM_UP]
    third = len(counted) // 3
    if third < 3:
        return None
    first, last = (
        [statistics.median(column) for column in list(zip(*part, strict=True))[1:5]]
        for part in (counted[:third], counted[-third:])
    )
    return Growth(*(after - before for before, after in zip(first, last, strict=True)))


def longest_stall(events: Iterable[Event], frozen: Sequence[tuple[float, float]]) -> float:
    """Seconds between the ends of two rounds of one life, without those in which the worker was frozen."""
    longest, before = 0.0, None
    for event in events:
        if isinstance(event, Started):
            before = None
        elif isinstance(event, StepDone):
            if before is not None:
                own = sum(max(0.0, min(event.time, till) - max(before, since)) for since, till in frozen)
                longest = max(longest, event.time - before - own)
            before = event.time
    return longest
