"""Processor quotas: a control group for each worker, in version 1 or 2 of Linux's hierarchy.

Version 2 is tested on files that look like it; the quotas themselves were measured with version 1.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from paceline.errors import LabError

__all__ = ["FOLDER", "CpuGroup", "Hierarchy", "Use", "find_hierarchy", "groups", "remove_folder", "wait_until"]

FOLDER = "paceline-lab"
PERIOD_MICROSECONDS = 20_000  # short beside a training step, long beside the scheduler's slices
SECONDS = 5.0
# Against the rest of the machine, workers come first, up to their quotas: else its other work would slow them down.
WEIGHT = {1: ("cpu.shares", "262144"), 2: ("cpu.weight", "10000")}


class Use(NamedTuple):
    """What a group has used so far."""

    cpu_seconds: float
    throttled_seconds: float
    """Time in which it could have run, but its quota was used up."""


class Hierarchy(NamedTuple):
    """Where the groups are: one folder for version 2, those of ``cpu`` and ``cpuacct`` for version 1."""

    version: int
    cpu: Path
    cpuacct: Path

    @property
    def roots(self) -> tuple[Path, ...]:
        """The folders that a process must be put into."""
        return tuple(dict.fromkeys((self.cpu, self.cpuacct)))


def find_hierarchy(mounts: str | None = None) -> Hierarchy:
    """Find the hierarchy that controls processors; ``mounts`` has the form of ``/proc/mounts``."""
    lines = (Path("/proc/mounts").read_text() if mounts is None else mounts).splitlines()
    table = [(fields[1], fields[2], fields[3].split(",")) for line in lines if len(fields := line.split()) >= 4]
    old = {
        name: Path(at)
        for name in ("cpu", "cpuacct")
        for at, kind, options in table
        if kind == "cgroup" and name in options
    }
    if len(old) == 2:
        return Hierarchy(1, old["cpu"], old["cpuacct"])
    for at, kind, _ in table:
        if kind == "cgroup2" and "cpu" in (Path(at) / "cgroup.controllers").read_text().split():
            return Hierarchy(2, Path(at), Path(at))
    raise LabError(
        "no cgroup hierarchy with the controller 'cpu' is mounted, so the lab cannot make slow processors; in a "
        "container, start it with access to the host's cgroups (docker: --privileged --cgroupns=host)"
    )


class CpuGroup:
    """The processes of one worker, and how much of the processor they get."""

    def __init__(self, hierarchy: Hierarchy, name: str) -> None:
        self._hierarchy = hierarchy
        self._folders = [root / FOLDER / name for root in hierarchy.roots]
        self._period = PERIOD_MICROSECONDS / 1e6
        self._cpu, self._cpuacct = hierarchy.cpu / FOLDER / name, hierarchy.cpuacct / FOLDER / name

    def create(self, cores: float) -> None:
        """Make the group, with a quota of so many cores (or a fraction of one)."""
        try:
            for folder in self._folders:
                folder.parent.mkdir(exist_ok=True)
                if self._hierarchy.version == 2:
                    for above in (folder.parent.parent, folder.parent):
                        (above / "cgroup.subtree_control").write_text("+cpu")
                folder.mkdir()
            file, weight = WEIGHT[self._hierarchy.version]
            (self._cpu.parent / file).write_text(weight)
        except OSError as error:
            raise LabError(f"cannot make the control group {self._cpu}: {error}") from error
        self.set_cpu(cores)

    def set_cpu(self, cores: float) -> None:
        """Change the quota."""
        # The kernel takes no quota below a millisecond: very slow processors have longer periods.
        period = max(PERIOD_MICROSECONDS, math.ceil(1000 / cores))
        quota = round(cores * period)
        if self._hierarchy.version == 2:
            (self._cpu / "cpu.max").write_text(f"{quota} {period}")
        else:
            (self._cpu / "cpu.cfs_quota_us").write_text("-1")  # no moment with a quota above the parent's or below 1 ms
            (self._cpu / "cpu.cfs_period_us").write_text(str(period))
            (self._cpu / "cpu.cfs_quota_us").write_text(str(quota))
        self._period = period / 1e6

    @property
    def joins(self) -> list[str]:
        """The files that a process writes its number to in order to join."""
        return [str(folder / "cgroup.procs") for folder in self._folders]

    def use(self) -> Use:
        """What was used so far."""
        stat = dict(line.split() for line in (self._cpu / "cpu.stat").read_text().splitlines())
        # The kernel adds the throttled time of several processors up; no period can be throttled for longer than it is.
        longest = int(stat.get("nr_throttled", 0)) * self._period
        if self._hierarchy.version == 2:
            return Use(int(stat["usage_usec"]) / 1e6, min(longest, int(stat.get("throttled_usec", 0)) / 1e6))
        used = int((self._cpuacct / "cpuacct.usage").read_text())
        return Use(used / 1e9, min(longest, int(stat["throttled_time"]) / 1e9))

    def processes(self) -> list[int]:
        """The numbers of the processes in it."""
        found: set[int] = set()
        for folder in self._folders:
            for file in folder.glob("**/cgroup.procs"):
                with contextlib.suppress(FileNotFoundError):
                    found.update(map(int, file.read_text().split()))
        return sorted(found - {0})  # 0 is a process of another pid namespace, and for kill(2) all of one's own group

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every process in it, those that are being forked meanwhile included."""
        reached: set[int] = set()
        while new := set(self.processes()) - reached:
            for process in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            reached |= new

    def remove(self) -> None:
        """Kill what is in it, and remove it."""

        def empty() -> bool:
            self.send(signal.SIGKILL)
            return not self.processes()

        wait_until(empty, f"the processes of {self._cpu.name} to end")
        for folder in self._folders:
            for below in sorted((path for path in folder.glob("**") if path.is_dir()), reverse=True):
                wait_until(partial(_removed, below), f"the kernel to give up the group {below}")


def groups(hierarchy: Hierarchy) -> list[str]:
    """The names of all groups of the lab that there are."""
    found: set[str] = set()
    for root in hierarchy.roots:
        if (root / FOLDER).is_dir():
            found.update(path.name for path in (root / FOLDER).iterdir() if path.is_dir())
    return sorted(found)


def remove_folder(hierarchy: Hierarchy) -> None:
    """Remove the folder of the groups, if there is one."""
    for root in hierarchy.roots:
        if (root / FOLDER).exists():
            (root / FOLDER).rmdir()


def wait_until(condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    """Wait until a condition holds; an error says what was waited for."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise LabError(f"waited {seconds:g} s for {what}, in vain")
        time.sleep(0.01)


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # its last process is still being cleared away
        return False
    return True
