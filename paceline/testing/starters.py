"""What the fixtures give to a test: they make groups of workers, and end them all."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paceline.errors import SettingError
from paceline.lab import Cluster, find_cluster, read_cluster
from paceline.testing.group import Group
from paceline.testing.places import InLab, Loopback, Place
from paceline.testing.processes import Work

__all__ = ["Job", "LabWorkers", "Workers"]

Job = Callable[..., Any] | Sequence[str]
"""A function at the top of a module, or the words of a command."""
NOTHING: Mapping[str, str] = MappingProxyType({})


class _Groups:
    """All groups of one test."""

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._made: list[Group] = []

    def make(self, place: Place, work: Work, environment: Mapping[str, str]) -> Group:
        self._made.append(Group(place, work, environment, self._folder()))
        return self._made[-1]

    def close(self) -> None:
        forgotten = [group for group in self._made if group.forgotten]
        for group in self._made:
            group.close()
        if forgotten:
            raise SettingError("faults were declared for a group that was never started; call group.wait(seconds)")


class Workers:
    """The fixture ``workers``: groups on this machine, connected by its loopback network. No rights are needed."""

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._groups = _Groups(folder)

    def __call__(self, job: Job, *args: Any, size: int, environment: Mapping[str, str] = NOTHING) -> Group:
        """So many workers that call ``job(*args)`` or run a command, with torchrun's variables; not started yet."""
        if size < 1:
            raise SettingError(f"a group of {size} workers cannot be; size must be at least 1")
        return self._groups.make(Loopback(size), as_work(job, args, environment.get("PATH")), environment)

    def close(self) -> None:
        """End all groups."""
        self._groups.close()


class LabWorkers:
    """The fixture ``lab_workers``: groups in the lab, where links can be cut and throttled. It needs root."""

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._groups = _Groups(folder)

    def __call__(
        self, cluster: Cluster | Path | str, job: Job, *args: Any, environment: Mapping[str, str] = NOTHING
    ) -> Group:
        """A group with a worker for each one of the cluster: a description, its file, or the name of an example."""
        if not isinstance(cluster, Cluster):
            cluster = read_cluster(find_cluster(str(cluster)))
        if cluster.events:
            raise SettingError(
                "the cluster has events, which happen by the clock; leave them out, and say group.at(step=…, worker=…)"
            )
        return self._groups.make(InLab(cluster), as_work(job, args, environment.get("PATH")), environment)

    def close(self) -> None:
        """End all groups."""
        self._groups.close()


def as_work(job: Job, args: tuple[Any, ...], path: str | None) -> Work:
    """What a test has asked for, if it can be started; ``path`` is where commands are looked for."""
    if callable(job):
        try:
            pickle.dumps((job, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            name = getattr(job, "__qualname__", repr(job))
            raise SettingError(
                f"{name} cannot be sent to other processes: {error}; give a function at the top of a module (no "
                "lambda, no function in a function), and arguments that can be pickled"
            ) from None
        return Work(job, args)
    if isinstance(job, str) or not job or not all(isinstance(word, str) for word in job):
        raise SettingError(f"{job!r} is neither a function nor a command; a command is a list: ['python', 'train.py']")
    if args:
        raise SettingError(f"the arguments {args!r} are for a function; write those of a command into its list")
    if not shutil.which(job[0], path=path):
        raise SettingError(f"the command {job[0]!r} does not exist, or is not executable")
    return Work(None, tuple(job))
