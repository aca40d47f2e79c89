"""The cluster file: read, and checked for everything that could not be built or would have no effect."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paceline.errors import SettingError
from paceline.lab.cluster import Action, Cluster, Event, Link, Site, Worker, parse_rate

__all__ = ["example_files", "find_cluster", "read_cluster"]

EXAMPLES = Path(__file__).parent / "clusters"
NAME = re.compile(r"[a-z][a-z0-9-]{0,9}")  # an interface of the kernel is called after it: 15 characters at most
MAX_WORKERS = 64


class _Place(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    rate: str | None = None
    up: str | None = None
    down: str | None = None


class _Worker(_Place, forbid_unknown_fields=True, kw_only=True):
    cpu: float = 1.0
    count: int = 1
    name: str | None = None
    site: str | None = None


class _Site(_Place, forbid_unknown_fields=True, kw_only=True):
    name: str


class _Event(_Place, forbid_unknown_fields=True, kw_only=True):
    at: float
    do: Action
    worker: str | None = None
    site: str | None = None
    cpu: float | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    worker: list[_Worker]
    site: list[_Site] = []
    event: list[_Event] = []


def example_files() -> dict[str, Path]:
    """The clusters that come with Paceline, by name."""
    return {path.stem: path for path in sorted(EXAMPLES.glob("*.toml"))}


def find_cluster(name: str) -> Path:
    """The file of this path, or the example of this name."""
    path = Path(name)
    if path.is_file():
        return path
    if name in (examples := example_files()):
        return examples[name]
    raise SettingError(
        f"there is no cluster file {name!r}, and no example of that name; the examples are {', '.join(examples)}"
    )


def read_cluster(path: Path, cores: int | None = None) -> Cluster:
    """Read and check a cluster file; ``cores`` are those of this machine, unless given."""
    try:
        raw = msgspec.convert(tomllib.loads(path.read_text()), _File)
        return _build(raw, cores or len(os.sched_getaffinity(0)))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise SettingError(f"{path.name} is not a TOML file that can be read: {error}") from None
    except msgspec.ValidationError as error:
        raise SettingError(f"{path.name}: {error}") from None
    except SettingError as error:
        raise SettingError(f"{path.name}: {error}") from None


def _build(raw: _File, cores: int) -> Cluster:
    sites = tuple(Site(_name(site.name, "site"), _link(site, f"site {site.name!r}")) for site in raw.site)
    workers = tuple(_workers(raw.worker))
    if not 1 <= len(workers) <= MAX_WORKERS:
        raise SettingError(f"{len(workers)} workers: there must be from 1 to {MAX_WORKERS}")
    names = [site.name for site in sites] + [worker.name for worker in workers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingError(f"the name {twice[0]!r} is used twice; workers and sites need names of their own")
    known = {site.name for site in sites}
    for worker in workers:
        if worker.site is not None and worker.site not in known:
            raise SettingError(
                f"worker {worker.name!r} is at site {worker.site!r}, which is not described; {_sites(known)}"
            )
    empty = known - {worker.site for worker in workers}
    if empty:
        raise SettingError(
            f"no worker is at site {min(empty)!r}; give one site = {min(empty)!r}, or leave the site out"
        )
    events = tuple(sorted((_event(event, workers, known) for event in raw.event), key=lambda event: event.at))
    cluster = Cluster(workers, sites, events)
    _check_cpu(cluster, cores)
    _check_sequence(cluster)
    return cluster


def _workers(described: list[_Worker]) -> Iterator[Worker]:
    rank = 0
    for worker in described:
        if not 1 <= worker.count <= MAX_WORKERS:
            raise SettingError(f"a worker has count = {worker.count}; it must be from 1 to {MAX_WORKERS}, or left out")
        for number in range(worker.count):
            name = f"w{rank}" if worker.name is None else worker.name
            if worker.name is not None and worker.count > 1:
                name = f"{worker.name}-{number}"
            link = _link(worker, f"worker {name!r}")
            if not worker.cpu >= 0.02:
                raise SettingError(f"worker {name!r} has cpu = {worker.cpu:g}; it must be at least 0.02 of a core")
            yield Worker(_name(name, "worker"), rank, worker.cpu, link, worker.site)
            rank += 1


def _name(name: str, kind: str) -> str:
    if not NAME.fullmatch(name) or name == "localhost":
        raise SettingError(
            f"the {kind} name {name!r} cannot be used: it must begin with a small letter and have at most 10 small "
            "letters, digits and hyphens, and localhost is every host's own"
        )
    return name


def _link(place: _Place, whose: str) -> Link:
    if place.rate is not None and (place.up is not None or place.down is not None):
        raise SettingError(f"{whose} has rate and up or down; write either rate for both directions, or up and down")
    up, down = (place.rate if one is None else one for one in (place.up, place.down))
    if up is None or down is None:
        raise SettingError(f"{whose} needs a rate for both directions: rate = '100mbit', or up = … and down = …")
    return Link(parse_rate(up), parse_rate(down))


def _event(event: _Event, workers: tuple[Worker, ...], sites: set[str]) -> Event:
    what = f"the event at {event.at:g} s"
    if not 0 <= event.at <= 10**6:
        raise SettingError(f"{what} must be at 0 seconds or later")
    if (event.worker is None) == (event.site is None):
        raise SettingError(f"{what} needs one target: worker = … or site = …")
    if event.worker is not None and event.worker not in {worker.name for worker in workers}:
        known = ", ".join(worker.name for worker in workers)
        raise SettingError(f"{what} is for worker {event.worker!r}, which does not exist; there are {known}")
    if event.site is not None and event.site not in sites:
        raise SettingError(f"{what} is for site {event.site!r}, which is not described; {_sites(sites)}")
    if event.site is not None and (event.do not in ("set", "cut", "restore") or event.cpu is not None):
        raise SettingError(f"{what} cannot happen to a site: only its link can be set, cut and restored")
    changes_link = event.rate is not None or event.up is not None or event.down is not None
    if event.do == "set" and event.cpu is None and not changes_link:
        raise SettingError(f"{what} sets nothing; give it cpu, or rate (or up and down)")
    if event.do != "set" and (event.cpu is not None or changes_link):
        raise SettingError(f"{what} has do = {event.do!r}, so cpu, rate, up and down have no effect; leave them out")
    if event.cpu is not None and not event.cpu >= 0.02:
        raise SettingError(f"{what} sets cpu = {event.cpu:g}; it must be at least 0.02 of a core")
    link = _link(event, what) if changes_link else None
    return Event(event.at, event.worker or event.site or "", event.do, event.cpu, link)


def _sites(sites: set[str]) -> str:
    return f"the sites are {', '.join(sorted(sites))}" if sites else "there is no [[site]]"


def _check_cpu(cluster: Cluster, cores: int) -> None:
    """What is asked for must be there at every moment: a quota takes away, it cannot give."""
    now = {worker.name: worker.cpu for worker in cluster.workers}
    moments = [(0.0, None, None), *((event.at, event.target, event.cpu) for event in cluster.events)]
    for at, target, cpu in moments:
        if target is not None and cpu is not None:
            now[target] = cpu
        total = sum(now.values())
        if total > cores + 1e-9:
            when = f"from {at:g} s on " if target else ""
            raise SettingError(
                f"the workers need {total:g} cores {when}together, but this machine has {cores}; lower their cpu, or "
                "have fewer workers"
            )


def _check_sequence(cluster: Cluster) -> None:
    """An event that cannot do anything is a mistake of the author."""
    opposite = {"restore": "cut", "thaw": "freeze"}
    on: set[tuple[str, str]] = set()
    started = {worker.name for worker in cluster.workers} - cluster.late
    dead: set[str] = set()
    for event in cluster.events:
        what, name = f"the event at {event.at:g} s ({event})", event.target
        if event.do == "start":
            if name in started:
                raise SettingError(f"{what} starts a worker that runs already; each can be started once")
            started.add(name)
            continue
        if event.do in ("freeze", "thaw", "kill") and name not in started:
            raise SettingError(f"{what} comes before the worker is started")
        if event.do in ("freeze", "thaw", "kill") and name in dead:
            raise SettingError(f"{what} comes after the worker was killed")
        if event.do == "kill":
            dead.add(name)
        elif event.do in opposite:
            if (opposite[event.do], name) not in on:
                raise SettingError(f"{what} has no effect: there is no {opposite[event.do]!r} of it before")
            on.remove((opposite[event.do], name))
        elif event.do in opposite.values():
            if (event.do, name) in on:
                raise SettingError(f"{what} has no effect: it is in that state already")
            on.add((event.do, name))
