"""A cluster: what the lab has to build, and what happens to it when."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from paceline.errors import SettingError

__all__ = ["Action", "Cluster", "Event", "Link", "Site", "Worker", "parse_rate", "show_rate"]

UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}

Action = Literal["set", "cut", "restore", "freeze", "thaw", "kill", "start"]


class Link(msgspec.Struct, frozen=True):
    """Bits per second in both directions, seen from the worker or the site."""

    up: int
    down: int


class Worker(msgspec.Struct, frozen=True):
    """A machine of the cluster, which runs one process of the training."""

    name: str
    rank: int
    cpu: float
    """Cores, or a fraction of one."""
    link: Link
    site: str | None = None


class Site(msgspec.Struct, frozen=True):
    """A place whose workers are near to each other; its link leads to everybody else."""

    name: str
    link: Link


class Event(msgspec.Struct, frozen=True):
    """Something that happens ``at`` so many seconds after the workers were started."""

    at: float
    target: str
    """The name of a worker or of a site."""
    do: Action
    cpu: float | None = None
    link: Link | None = None

    def __str__(self) -> str:
        changes = [] if self.cpu is None else [f"cpu {self.cpu:g}"]
        if self.link is not None:
            changes.append(f"{show_rate(self.link.up)} up, {show_rate(self.link.down)} down")
        return " ".join([self.do, self.target, ", ".join(changes)]).rstrip()


class Cluster(msgspec.Struct, frozen=True):
    """Workers, the sites that they are at, and events in the order of time."""

    workers: tuple[Worker, ...]
    sites: tuple[Site, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def late(self) -> frozenset[str]:
        """The workers that an event starts."""
        return frozenset(event.target for event in self.events if event.do == "start")


def parse_rate(text: str) -> int:
    """Bits per second of ``100mbit``, ``2.5gbit``, ``64kbit``."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?(kbit|mbit|gbit)", text.strip().lower())
    if not found:
        raise SettingError(f"a rate of {text!r} is not understood; write a number and a unit, such as '100mbit'")
    rate = round(float(found[1]) * UNITS[found[2]])
    if not 8_000 <= rate <= 100 * 10**9:
        raise SettingError(
            f"a rate of {text!r} cannot be built; it must be from 8kbit to 100gbit (to have no link at all for a "
            "while, use an event: do = 'cut')"
        )
    return rate


def show_rate(rate: int) -> str:
    """The rate as one would write it in a file."""
    unit = max((unit for unit in UNITS if rate >= UNITS[unit]), key=UNITS.__getitem__)
    return f"{rate / UNITS[unit]:g}{unit}"
