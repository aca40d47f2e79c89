"""One lab at a time, and nothing left of it: whatever killed the last one, the next start clears away its remains."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import LabError
from paceline.lab.cgroups import FOLDER, CpuGroup, Hierarchy, find_hierarchy, groups, remove_folder
from paceline.lab.network import namespaces, remove_namespace

__all__ = ["HOSTS", "clean", "only_lab", "remains"]

LOCK = Path("/run/paceline-lab.lock")
HOSTS = Path("/run/paceline-lab.hosts")


class _Owner(msgspec.Struct):
    process: int
    cluster: str
    since: str


@contextmanager
def only_lab(cluster: str) -> Iterator[None]:
    """Be the only lab of this machine; the kernel gives the place back however this process ends."""
    with open(LOCK, "a+b") as file:
        _lock(file)
        owner = _Owner(os.getpid(), cluster, time.strftime("%H:%M:%S"))
        file.truncate(0)
        file.write(msgspec.json.encode(owner))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _lock(file: Any) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        whose = "another process"
        with suppress(msgspec.DecodeError):
            owner = msgspec.json.decode(file.read(), type=_Owner)
            whose = f"process {owner.process} (cluster {owner.cluster}, since {owner.since})"
        raise LabError(
            f"a lab is already running on this machine, in {whose}; wait until it has ended, or stop it: two would "
            "take each other's processors"
        ) from None


def remains(hierarchy: Hierarchy | None = None) -> list[str]:
    """What is there of a lab, by name."""
    hierarchy = hierarchy or find_hierarchy()
    found = [f"namespace {name}" for name in namespaces()]
    found += [f"control group {FOLDER}/{name}" for name in groups(hierarchy)]
    if not groups(hierarchy):
        found += [f"control group {FOLDER}" for root in hierarchy.roots[:1] if (root / FOLDER).exists()]
    return found


def clean() -> list[str]:
    """Kill all processes of a lab, and remove its groups, namespaces and links; gives what was there.

    The caller must hold :func:`only_lab`. Bridges and links go with their namespaces.
    """
    hierarchy = find_hierarchy()
    found = remains(hierarchy)
    troubles = []
    with _no_signals():
        steps: list[Callable[[], None]] = [partial(CpuGroup(hierarchy, name).remove) for name in groups(hierarchy)]
        steps += [partial(remove_folder, hierarchy)]
        steps += [partial(remove_namespace, name) for name in namespaces()]
        steps += [partial(HOSTS.unlink, missing_ok=True)]
        for step in steps:
            try:
                step()
            except (LabError, OSError) as error:  # the rest can go all the same
                troubles.append(str(error))
    if troubles:
        raise LabError("the lab could not be taken down:\n" + "\n".join(f"- {each}" for each in troubles))
    return found


@contextmanager
def _no_signals() -> Iterator[None]:
    """An impatient second Ctrl-C must not leave half of it: it is heard when all is done."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
