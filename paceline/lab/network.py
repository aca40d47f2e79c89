"""The network: a namespace for each worker, links to bridges in a namespace of their own, and shaping.

::

    worker ── eth0 ═══ w0 ┐                               ┌ … ═══ eth0 ── worker
                          ├ site bridge ═══ core bridge ──┤
    worker ── eth0 ═══ w1 ┘                               └ … ═══ eth0 ── worker

Every ``═══`` is a veth pair whose both ends have a token bucket filter: the nearer end shapes what goes up, the
farther what goes down. All of it, the bridges too, lies in namespaces that the lab made: the machine's own network gets
no interface, no route and no rule.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import NamedTuple

from paceline.errors import LabError
from paceline.lab.cgroups import wait_until
from paceline.lab.cluster import Cluster, Link
from paceline.lab.tools import run

__all__ = ["PREFIX", "Network", "Traffic", "namespaces", "remove_namespace"]

PREFIX = "paceline-"
SWITCH = f"{PREFIX}switch"
INTERFACE = "eth0"
CORE = "core"
# The range that is set aside for benchmarks of networks (RFC 2544): nobody's office has it.
ADDRESS = "198.18.{0}.{1}"


class Traffic(NamedTuple):
    """Bytes that have passed an interface."""

    sent: int
    received: int


class Network:
    """The network of a cluster, from :meth:`build` to :func:`remove_namespace` of each of its namespaces."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._sites = {site.name for site in cluster.sites}
        self._bridge_of = {
            worker.name: CORE if worker.site is None else f"b-{worker.site}" for worker in cluster.workers
        }

    def build(self) -> None:
        """Make namespaces, bridges and links."""
        run("ip", "netns", "add", SWITCH)
        _add_bridge(CORE)
        for site in self._cluster.sites:
            near, far = f"u-{site.name}", f"d-{site.name}"
            _add_bridge(f"b-{site.name}")
            run("ip", "-n", SWITCH, "link", "add", "name", near, "type", "veth", "peer", "name", far)
            run("ip", "-n", SWITCH, "link", "set", "dev", near, "master", f"b-{site.name}", "up")
            run("ip", "-n", SWITCH, "link", "set", "dev", far, "master", CORE, "up")
            self.shape(site.name, site.link)
        for worker in self._cluster.workers:
            self.add_host(worker.name, worker.rank + 1, self._bridge_of[worker.name])
            self.shape(worker.name, worker.link)

    def add_host(self, name: str, number: int, bridge: str = CORE) -> None:
        """A namespace of its own, linked to a bridge, as yet without any limit."""
        space = namespace(name)
        run("ip", "netns", "add", space)
        run(
            "ip",
            "link",
            "add",
            "name",
            INTERFACE,
            "netns",
            space,
            "type",
            "veth",
            "peer",
            "name",
            f"p-{name}",
            "netns",
            SWITCH,
        )
        run("ip", "-n", space, "addr", "add", f"{address(number)}/16", "dev", INTERFACE)
        run("ip", "-n", space, "link", "set", "dev", INTERFACE, "up")
        run("ip", "-n", space, "link", "set", "dev", "lo", "up")
        run("ip", "-n", SWITCH, "link", "set", "dev", f"p-{name}", "master", bridge, "up")

    def bridge_of(self, worker: str) -> str:
        """The bridge that a worker's link leads to."""
        return self._bridge_of[worker]

    def shape(self, name: str, link: Link) -> None:
        """Set the rates of a worker's or a site's link."""
        if name in self._sites:
            _limit(SWITCH, f"u-{name}", link.up)
            _limit(SWITCH, f"d-{name}", link.down)
        else:
            _limit(namespace(name), INTERFACE, link.up)
            _limit(SWITCH, f"p-{name}", link.down)

    def cut(self, name: str) -> None:
        """Let everything on this link be lost without a word, as if a switch had died behind it."""
        run("ip", "-n", SWITCH, "link", "set", "dev", self._far_end(name), "nomaster")

    def restore(self, name: str) -> None:
        """Make the link whole again."""
        bridge = CORE if name in self._sites else self._bridge_of[name]
        run("ip", "-n", SWITCH, "link", "set", "dev", self._far_end(name), "master", bridge)

    def traffic(self, name: str) -> Traffic:
        """What a worker's interface has counted."""
        found = json.loads(run("ip", "-n", namespace(name), "-s", "-j", "link", "show", INTERFACE))
        counted = found[0]["stats64"]
        return Traffic(counted["tx"]["bytes"], counted["rx"]["bytes"])

    def _far_end(self, name: str) -> str:
        return f"d-{name}" if name in self._sites else f"p-{name}"


def namespace(host: str) -> str:
    """The name of a host's network namespace."""
    return f"{PREFIX}h-{host}"  # a worker may be called switch


def address(number: int) -> str:
    """The address of the host of this number, from 1 on; a worker's is its rank and 1."""
    return ADDRESS.format(number // 250, number % 250 + 1)


def namespaces() -> list[str]:
    """All network namespaces of the lab that there are."""
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.glob(f"{PREFIX}*")) if folder.is_dir() else []


def remove_namespace(name: str) -> None:
    """Kill what runs in it, and remove it and all its interfaces."""

    def empty() -> bool:
        try:
            running = run("ip", "netns", "pids", name).split()
        except LabError:  # its file is there, but no namespace is mounted on it: its maker was killed in between
            return True
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        return not running

    wait_until(empty, f"the processes in the namespace {name} to end")
    run("ip", "netns", "del", name)


def _add_bridge(name: str) -> None:
    run("ip", "-n", SWITCH, "link", "add", "name", name, "type", "bridge")
    run("ip", "-n", SWITCH, "link", "set", "dev", name, "up")


def _limit(space: str, interface: str, rate: int) -> None:
    """Let so many bits per second leave an interface."""
    # The bucket must hold what the rate brings in one tick of the kernel's clock (4 ms at worst), and a few packets.
    burst = max(4_000, rate * 4 // 8 // 1000)
    run(
        *("tc", "-n", space, "qdisc", "replace", "dev", interface, "root"),
        *("tbf", "rate", f"{rate}bit", "burst", f"{burst}b", "latency", "50ms"),
    )
