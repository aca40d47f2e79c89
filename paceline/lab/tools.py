"""The commands of the system that the lab is built with, and whether they are here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from paceline.errors import LabError
from paceline.lab.cgroups import find_hierarchy

__all__ = ["check_needs", "missing", "run"]

COMMANDS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
SECONDS = 20.0


def run(*command: str) -> str:
    """Run a command of the system; its output, or an error with what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except FileNotFoundError:
        raise LabError(f"the command {command[0]!r} is not on this machine; {_how_to_get(command[0])}") from None
    except subprocess.TimeoutExpired:
        raise LabError(f"'{' '.join(command)}' gave no answer within {SECONDS:g} s") from None
    if done.returncode:
        raise LabError(f"'{' '.join(command)}' failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def missing() -> list[str]:
    """What keeps the lab from working here, and how to get it; empty if nothing does."""
    if sys.platform != "linux":
        return [f"the lab needs Linux (network namespaces and cgroups); this is {sys.platform}"]
    found = [f"{name} is not installed: {_how_to_get(name)}" for name in COMMANDS if not shutil.which(name)]
    if os.geteuid() != 0:
        found.append("it must be run as root, to make network namespaces and cgroups: use sudo")
    else:
        try:
            find_hierarchy()
        except LabError as error:
            found.append(str(error))
        if not found:
            found += _try_namespaces()
    return found


def check_needs() -> None:
    """Raise an error that lists everything that is missing."""
    found = missing()
    if found:
        raise LabError("the lab cannot work on this machine:\n" + "\n".join(f"- {each}" for each in found))


def _try_namespaces() -> list[str]:
    """Containers are often root without the right to make a namespace or to shape a link."""
    name = f"pacelinetry-{os.getpid()}"  # no name of a lab, whose remains others may remove
    try:
        run("ip", "netns", "add", name)
        try:
            run("ip", "-n", name, "link", "add", "name", "a", "type", "veth", "peer", "name", "b")
            run(
                "tc",
                "-n",
                name,
                "qdisc",
                "add",
                "dev",
                "a",
                "root",
                "tbf",
                "rate",
                "1mbit",
                "burst",
                "16k",
                "latency",
                "1ms",
            )
        finally:
            run("ip", "netns", "del", name)
    except LabError as error:
        return [f"network namespaces, veth links and tbf shaping do not work here: {error}"]
    return []


def _how_to_get(command: str) -> str:
    return f"install {COMMANDS.get(command, command)} (Debian: apt-get install {COMMANDS.get(command, command)})"
