"""What a cluster really gives, beside what was asked for."""

from __future__ import annotations

import math
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from paceline.errors import LabError
from paceline.lab import flow
from paceline.lab.lab import Lab
from paceline.lab.network import CORE, address, namespace

__all__ = ["Measured", "measure_cpu", "measure_links"]

TOLERANCE = 0.1
SECONDS = 2.5
FEWEST_BITS = 2_000_000  # for a figure that single packets do not disturb
MOST_SECONDS = 30.0
TRIES = 3  # what is off is measured again: the machine itself may have been taken away for a second
SPIN = "while :; do :; done"
FIRST_PROBE = 60_000  # no worker has such a number
# A rate limits frames. One of 1514 bytes carries 1448 of a stream: Ethernet takes 14, IP 20, TCP with time stamps 32.
# (Counters of interfaces do not tell: they count packets before they are cut into frames.)
WIRE = 1514 / 1448


class Measured(NamedTuple):
    """One thing that was measured: cores, or bits per second on the wire, headers included."""

    name: str
    what: str
    asked: float
    found: float
    tries: int = 1
    """How often it was measured; the last time counts."""

    @property
    def ratio(self) -> float:
        """What was found over what was asked for."""
        return self.found / self.asked

    @property
    def good(self) -> bool:
        """Whether it is within a tenth."""
        return abs(self.ratio - 1) <= TOLERANCE


def measure_cpu(lab: Lab, seconds: float = 2.0) -> list[Measured]:
    """Let all workers compute as much as they can, at the same time, and see how much that is."""
    workers = lab.cluster.workers
    with _processes() as start:
        for worker in workers:
            for _ in range(math.ceil(worker.cpu)):
                start(lab.command(worker.name, ["sh", "-c", SPIN]))
        time.sleep(0.5)
        before, since = [lab.use(worker.name).cpu_seconds for worker in workers], time.monotonic()
        time.sleep(seconds)
        after, wall = [lab.use(worker.name).cpu_seconds for worker in workers], time.monotonic() - since
    return [
        Measured(worker.name, "cpu", worker.cpu, (end - begin) / wall)
        for worker, begin, end in zip(workers, before, after, strict=True)
    ]


def measure_links(lab: Lab) -> Iterator[Measured]:
    """Send bytes over every link, one after the other, to and from a host without limits at its end."""
    bridges = [CORE, *(f"b-{site.name}" for site in lab.cluster.sites)]
    probes = {bridge: (f"PROBE{number}", FIRST_PROBE + number) for number, bridge in enumerate(bridges)}
    for bridge, (name, number) in probes.items():
        lab.network.add_host(name, number, bridge)
    for worker in lab.cluster.workers:
        own, probe = (worker.name, worker.rank + 1), probes[lab.network.bridge_of(worker.name)]
        yield _measure(worker.name, "up", own, probe, worker.link.up)
        yield _measure(worker.name, "down", probe, own, worker.link.down)
    for site in lab.cluster.sites:
        inside, outside = probes[f"b-{site.name}"], probes[CORE]
        yield _measure(site.name, "up", inside, outside, site.link.up)
        yield _measure(site.name, "down", outside, inside, site.link.down)


def _measure(name: str, what: str, source: tuple[str, int], target: tuple[str, int], rate: int) -> Measured:
    for tries in range(1, TRIES + 1):
        found = Measured(name, what, rate, _flow(source, target, rate), tries)
        if found.good:
            break
    return found


def _flow(source: tuple[str, int], target: tuple[str, int], rate: int) -> float:
    """Bits per second from one host to another, over a link that should have this rate."""
    seconds = min(max(SECONDS, FEWEST_BITS / rate), MOST_SECONDS)
    with _processes() as start:
        receiver = start(_in(target[0], "receive", str(seconds)))
        assert receiver.stdout is not None
        if not select.select([receiver.stdout], [], [], flow.PATIENCE)[0] or not receiver.stdout.readline():
            raise LabError(f"nothing could be received at {target[0]}")
        start(_in(source[0], "send", address(target[1]), str(2 * seconds + flow.PATIENCE)))
        try:
            told, _ = receiver.communicate(timeout=seconds + 3 * flow.PATIENCE)
            return float(told) * WIRE
        except (subprocess.TimeoutExpired, ValueError):
            raise LabError(f"no bytes came from {source[0]} to {target[0]}") from None


def _in(host: str, *arguments: str) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{namespace(host)}", "--", sys.executable, flow.__file__, *arguments]


class _Start:
    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        self.started.append(process)
        return process


@contextmanager
def _processes() -> Iterator[_Start]:
    """Processes that end with the block."""
    start = _Start()
    try:
        yield start
    finally:
        for process in start.started:
            process.kill()
            process.communicate()
