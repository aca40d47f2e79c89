"""How a swarm begins: its workers come together once, to hand out the key and to say where they listen."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from paceline.codec import Identity, Lattice
from paceline.errors import SettingError
from paceline.fleet import Fleet
from paceline.gossip.board import Board
from paceline.gossip.clerk import Clerk
from paceline.gossip.finale import Whole
from paceline.gossip.graph import Graph
from paceline.gossip.invitation import Invitation
from paceline.gossip.keys import Secret, share_secret
from paceline.gossip.members import Members, News, State
from paceline.gossip.node import Node
from paceline.gossip.points import Points
from paceline.gossip.sockets import Sockets
from paceline.gossip.wire import HEADER_LIMIT, Card

__all__ = ["Shape", "open_node", "start"]

WRAPPING = 1024  # bytes that encryption adds to a frame, at most


class Shape(msgspec.Struct, frozen=True):
    """What kind of model is averaged, and how; the same on all workers."""

    numel: int
    """Numbers that exchanges average."""
    more: int
    """Numbers that only belong to the whole model."""
    counters: int
    """Bytes of whole numbers that belong to it."""
    tensors: str
    """A digest of their names and shapes."""
    codec: Lattice | Identity
    measured: int | None = None
    """How many of the numbers that are averaged are parameters, the first ones; None for all."""


def start(
    fleet: Fleet,
    shape: Shape,
    counters: Tensor,
    graph: Graph,
    *,
    blocking: bool = False,
    bind: str = "127.0.0.1",
    plain: bool = False,
) -> tuple[Node, Invitation]:
    """Become a member together with all other workers of the fleet: all of them must call it.

    Also gives what one that comes later has to know.
    """
    graph.neighbours(range(fleet.size))  # one that does not connect all is an error now
    secret = share_secret(fleet, plain)
    sockets, points = _listen(bind, secret, shape)
    try:
        own = News(fleet.rank, sockets.address, 0, State.HERE, 0)
        told = fleet.gather(
            msgspec.json.encode((own, loopback_of(Path("/proc")))), "the addresses at which the others listen"
        )
        found = [msgspec.json.decode(each, type=tuple[News, str]) for each in told]
        _check_reach(found)
        news = [each for each, _ in found]
        members = Members(own, graph)
        members.hear(news)
        invitation = Invitation(secret, fleet.size, [each.address for each in news])
        return _run(members, sockets, points, secret, shape, counters, blocking, ()), invitation
    except BaseException:
        sockets.close()
        raise


def loopback_of(processes: Path) -> str:
    """A name for the machine, or the network namespace on it, in which a loopback address is the same."""
    try:
        booted = (processes / "sys/kernel/random/boot_id").read_text().strip()
        return f"{booted}/{(processes / 'self/ns/net').stat().st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()


def _check_reach(found: Sequence[tuple[News, str]]) -> None:
    """Refuse members that listen where only their own machine can reach them, if there are others: on every worker."""
    for news, where in found:
        host = news.address.removeprefix("tcp://").rpartition(":")[0]
        other = next((each.number for each, place in found if place != where), None)
        if other is not None and (host.startswith("127.") or host == "localhost"):
            raise SettingError(
                f"member {news.number} listens at {news.address}, which member {other} on another machine cannot "
                "reach; give Gossip(bind=…) an address of each machine that the others can reach"
            )


def open_node(
    number: int,
    life: int,
    secret: Secret,
    shape: Shape,
    counters: Tensor,
    graph: Graph,
    *,
    contacts: Sequence[str],
    blocking: bool = False,
    bind: str = "127.0.0.1",
) -> Node:
    """Come to a swarm that trains already, as member ``number`` in its ``life``; ``contacts`` are addresses in it."""
    sockets, points = _listen(bind, secret, shape)
    try:
        members = Members(News(number, sockets.address, life, State.JOINING, 0), graph)
        return _run(members, sockets, points, secret, shape, counters, blocking, contacts)
    except BaseException:
        sockets.close()
        raise


def _listen(bind: str, secret: Secret, shape: Shape) -> tuple[Sockets, Points]:
    """Sockets, and what models are encoded with. That is compiled before: who connects meanwhile is not answered."""
    points = Points(shape.codec, shape.numel)
    points.prepare()
    return Sockets(bind, secret.keys, _limit(shape, points)), points


def _run(
    members: Members,
    sockets: Sockets,
    points: Points,
    secret: Secret,
    shape: Shape,
    counters: Tensor,
    blocking: bool,
    contacts: Sequence[str],
) -> Node:
    whole = Whole(shape.numel + shape.more, shape.counters, shape.numel, shape.measured)
    board = Board(shape.numel, shape.more)
    now = time.monotonic()
    clerk = Clerk(members, points, board, whole, counters, blocking=blocking, contacts=contacts, now=now)
    return Node(clerk, sockets, Card(secret.run, hashlib.sha256(repr(shape).encode()).hexdigest()))


def _limit(shape: Shape, points: Points) -> int:
    """The longest frame that a worker of this run may send."""
    whole = Whole(shape.numel + shape.more, shape.counters)
    return max(whole.bytes, HEADER_LIMIT, *map(points.bytes_for, points.levels)) + WRAPPING
