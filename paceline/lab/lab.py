"""A cluster on this machine: built, used, and taken down again."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType

from paceline.errors import SettingError
from paceline.heap import keep_freed
from paceline.lab.cgroups import CpuGroup, Use, find_hierarchy
from paceline.lab.cluster import Cluster, Event, Worker
from paceline.lab.network import INTERFACE, Network, Traffic, address, namespace
from paceline.lab.remains import HOSTS, clean, only_lab
from paceline.lab.tools import check_needs

__all__ = ["Lab"]

PORT = 29500
# What a worker's shell does before it becomes the command: join the groups, then (in namespaces of its own) take the
# worker's name and the hosts file of the lab.
JOIN = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo $$ > "$1" || exit 125; shift; n=$((n - 1)); done; exec "$@"'
SETTLE = 'mount --bind "$1" /etc/hosts && echo "$2" > /proc/sys/kernel/hostname || exit 125; shift 2; exec "$@"'


class Lab:
    """Namespaces, links and control groups of a cluster, from ``with Lab(cluster):`` to its end.

    There is one lab on a machine at a time. What an earlier one left behind, because it was killed, is removed first.
    """

    def __init__(self, cluster: Cluster, name: str = "cluster") -> None:
        self.cluster = cluster
        self.network = Network(cluster)
        self._name = name
        self._workers = {worker.name: worker for worker in cluster.workers}
        self._groups: dict[str, CpuGroup] = {}
        self._exits = ExitStack()

    def __enter__(self) -> Lab:
        with ExitStack() as exits:
            check_needs()
            exits.enter_context(only_lab(self._name))
            exits.enter_context(_signals_as_exits())
            clean()
            exits.callback(clean)
            self.network.build()
            HOSTS.write_text(_hosts(self.cluster))
            hierarchy = find_hierarchy()
            for worker in self.cluster.workers:
                self._groups[worker.name] = CpuGroup(hierarchy, f"w-{worker.name}")  # a worker may be called tasks
                self._groups[worker.name].create(worker.cpu)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """What starts a command as this worker: in its namespaces, in its group, and ended with this process.

        Inside, the host is called after the worker, and the names of all workers lead to their addresses.

        Start it from the main thread: the kernel ends it with the thread that did.
        """
        joins = self._groups[name].joins
        enter = ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{namespace(name)}", "--"]
        settle = ["unshare", "--mount", "--uts", "sh", "-c", SETTLE, "sh", str(HOSTS), name]
        return ["sh", "-c", JOIN, "sh", str(len(joins)), *joins, *enter, *settle, *command]

    def environment(self, name: str) -> dict[str, str]:
        """The variables that torchrun would set for this worker, if every worker were a machine."""
        worker, size = self._workers[name], str(len(self._workers))
        rank = str(worker.rank)
        return {
            "RANK": rank,
            "GROUP_RANK": rank,
            "ROLE_RANK": rank,
            "LOCAL_RANK": "0",
            "WORLD_SIZE": size,
            "GROUP_WORLD_SIZE": size,
            "ROLE_WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": address(1),
            "MASTER_PORT": str(PORT),
            **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), INTERFACE),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(math.ceil(worker.cpu))),
            **keep_freed(os.environ),
            "PYTHONUNBUFFERED": "1",
            "PACELINE_LAB_WORKER": name,
            **({"PACELINE_SITE": worker.site} if worker.site else {}),
        }

    def apply(self, event: Event) -> None:
        """Let an event happen now; ``start`` is the caller's."""
        match event.do:
            case "set":
                if event.cpu is not None:
                    self._groups[event.target].set_cpu(event.cpu)
                if event.link is not None:
                    self.network.shape(event.target, event.link)
            case "cut":
                self.network.cut(event.target)
            case "restore":
                self.network.restore(event.target)
            case "freeze":
                self.send(event.target, signal.SIGSTOP)
            case "thaw":
                self.send(event.target, signal.SIGCONT)
            case "kill":
                self.send(event.target, signal.SIGKILL)
            case "start":
                raise AssertionError("a worker is started by whoever has its command")

    def has_joined(self, name: str, process: int) -> bool:
        """Whether a process that was started as this worker is in its groups by now."""
        return process in self._groups[name].processes()

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to all processes of a worker."""
        self._groups[name].send(number)

    def use(self, name: str) -> Use:
        """What a worker has used of the processor."""
        return self._groups[name].use()

    def traffic(self, name: str) -> Traffic:
        """What a worker has sent and received."""
        return self.network.traffic(name)

    def worker(self, name: str) -> Worker:
        """The worker of this name."""
        return self._workers[name]


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, so that whatever was built is taken down."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # Python allows handlers nowhere else
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hosts(cluster: Cluster) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    lines += [f"{address(worker.rank + 1)} {worker.name}" for worker in cluster.workers]
    return "\n".join(lines) + "\n"


def check_command(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Refuse a command that cannot be started, before anything is built for it."""
    if not command:
        raise SettingError(
            "no command was given; write it behind the cluster: paceline lab run slow -- python train.py"
        )
    path = (os.environ if environment is None else environment).get("PATH")
    if not shutil.which(command[0], path=path):
        raise SettingError(f"the command {command[0]!r} does not exist, or is not executable; nothing was started")
