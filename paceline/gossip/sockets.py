"""ZeroMQ sockets for letters: one to hear everybody, one to talk to each partner. For one thread alone.

A letter that cannot be handed over at once is dropped: the protocol above survives losses, and nothing may pile up.
"""

from __future__ import annotations

import math
import re
import time
from collections import OrderedDict

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from paceline.errors import SettingError
from paceline.gossip.keys import Keys

__all__ = ["Sockets", "check_bind", "knock"]

WAITING = 8  # letters for, or of, one partner that may wait; more are dropped, or stay with their sender
PARTNERS = 1024  # connections that are kept
HANDSHAKE = 5_000  # milliseconds that a stranger may take to prove who it is
BEAT, DEAD = 2_000, 10_000  # milliseconds: a connection that is silent for so long is made anew
RETRY, LONGEST_RETRY = 50, 2_000  # milliseconds between attempts to connect
CONNECTED = 5_000  # milliseconds that one may take: without an answer the kernel asks ever more seldom, up to a minute
GOODBYE = 1_000  # milliseconds that the last letters have to leave
FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
SEEN = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | FAILED
ZAP = "inproc://zeromq.zap.01"  # where libzmq asks who may come in (rfc.zeromq.org/spec/27)
ZAP_REQUEST = 7  # frames: version, request, domain, address, identity, mechanism, key


class Sockets:
    """Listens at ``bind`` (``HOST`` or ``HOST:PORT``), to those that have the ``keys``, or to all if there are none.

    ``limit`` is the longest payload, in bytes: libzmq closes the connection of who sends more, before it takes it.
    """

    def __init__(self, bind: str, keys: Keys | None, limit: int) -> None:
        host, port = check_bind(bind)
        self._keys = keys
        self._context = zmq.Context()
        self._context.linger = 0  # close() says otherwise
        self._poller = zmq.Poller()
        self._zap: zmq.Socket[bytes] | None = None
        self.strangers = 0
        """Attempts to connect without the run's key, or with what is no ZeroMQ."""
        try:
            if keys is not None:
                self._zap = self._context.socket(zmq.REP)
                self._zap.bind(ZAP)
                self._poller.register(self._zap, zmq.POLLIN)
            self._ears = self._context.socket(zmq.ROUTER)
            self._ears.rcvhwm = WAITING
            self._ears.maxmsgsize = limit
            _secure(self._ears, keys, server=True)
            self._failures = self._ears.get_monitor_socket(FAILED)
            self._poller.register(self._failures, zmq.POLLIN)
            self.address = self._bind(host, port)
            self._poller.register(self._ears, zmq.POLLIN)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._mouths: OrderedDict[str, zmq.Socket[bytes]] = OrderedDict()

    def _bind(self, host: str, port: int) -> str:
        try:
            self._ears.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            raise SettingError(
                f"gossip cannot listen at {host}:{port or '(any port)'} ({error}); give bind= an address of this "
                "machine and a port that is free, or no port to take any"
            ) from error
        return str(self._ears.getsockopt_string(zmq.LAST_ENDPOINT))

    def watch(self, descriptor: int) -> None:
        """Let :meth:`wait` end when something can be read from a file descriptor, too."""
        self._poller.register(descriptor, zmq.POLLIN)

    def wait(self, seconds: float) -> None:
        """Until something comes, at most so long."""
        self._poller.poll(max(0, math.ceil(seconds * 1000)))
        while self._zap is not None and self._zap.poll(0):
            self._answer(self._zap)
        while self._failures.poll(0):
            self._failures.recv_multipart()
            self.strangers += 1

    def receive(self) -> list[bytes] | None:
        """The frames of the next letter; None if there is none now."""
        try:
            return self._ears.recv_multipart(zmq.NOBLOCK)[1:]  # without the name that libzmq gives the connection
        except zmq.Again:
            return None

    def send(self, address: str, frames: list[bytes]) -> bool:
        """Hand a letter over; False if it was dropped."""
        try:
            self._mouth(address).send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:  # the queue is full (Again), or there is no such address
            return False
        return True

    def keep(self, addresses: set[str]) -> None:
        """Close the connections to all others, with what waits to be sent there."""
        for address in [each for each in self._mouths if each not in addresses]:
            self._mouths.pop(address).close(0)

    def close(self) -> None:
        """Let the last letters leave, not for long."""
        self._context.destroy(linger=GOODBYE)

    def _mouth(self, address: str) -> zmq.Socket[bytes]:
        if address in self._mouths:
            self._mouths.move_to_end(address)
            return self._mouths[address]
        mouth = self._context.socket(zmq.DEALER)
        mouth.sndhwm = WAITING
        mouth.reconnect_ivl, mouth.reconnect_ivl_max = RETRY, LONGEST_RETRY
        mouth.connect_timeout = CONNECTED
        _secure(mouth, self._keys, server=False)
        try:
            mouth.connect(address)
        except zmq.ZMQError:
            mouth.close(0)
            raise
        self._mouths[address] = mouth
        if len(self._mouths) > PARTNERS:
            self._mouths.popitem(last=False)[1].close(0)
        return mouth

    def _answer(self, zap: zmq.Socket[bytes]) -> None:
        """Whether one that wants to connect may: only with the run's key."""
        assert self._keys is not None
        frames = zap.recv_multipart()
        number = frames[1] if len(frames) > 1 else b""
        same = len(frames) == ZAP_REQUEST and frames[5] == b"CURVE"
        known = same and frames[6] == z85.decode(self._keys.public.encode())
        code, text = (b"200", b"OK") if known else (b"400", b"not of this run")
        zap.send_multipart([b"1.0", number, code, text, b"", b""])


def knock(address: str, keys: Keys | None, seconds: float) -> bool:
    """Whether somebody listens there who takes the keys, found out within so many seconds.

    Who neither takes nor refuses them counts, too: it may be frozen. Who has the keys is not taken for a stranger.
    """
    context, connected, until = zmq.Context(), False, time.monotonic() + seconds
    try:
        mouth = context.socket(zmq.DEALER)
        _secure(mouth, keys, server=False)
        monitor = mouth.get_monitor_socket(SEEN)
        mouth.connect(address)
        while monitor.poll(max(0, math.ceil(1000 * (until - time.monotonic())))):
            event = recv_monitor_message(monitor)["event"]
            if event != zmq.EVENT_CONNECTED:
                return bool(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
            connected = True
        return connected
    except zmq.ZMQError:  # there is no such address
        return False
    finally:
        context.destroy(linger=0)


def _secure(socket: zmq.Socket[bytes], keys: Keys | None, server: bool) -> None:
    socket.handshake_ivl = HANDSHAKE
    socket.heartbeat_ivl, socket.heartbeat_timeout = BEAT, DEAD
    if keys is None:
        return
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()
    if server:
        socket.curve_server = True
    else:
        socket.curve_serverkey = keys.public.encode()


def check_bind(bind: str) -> tuple[str, int]:
    """Host and port of an address to listen at; the port is 0 for any."""
    found = re.fullmatch(r"([A-Za-z0-9_.-]+)(?::(\d{1,5}))?", bind) if isinstance(bind, str) else None
    if found is None or int(found[2] or 0) > 65_535:
        raise SettingError(f"bind ({bind!r}) must be HOST or HOST:PORT, such as '127.0.0.1' or '10.0.0.7:29600'")
    if found[1] == "0.0.0.0":
        raise SettingError(
            f"bind ({bind!r}) is no address that others could reach; give that of this machine in their network"
        )
    return found[1], int(found[2] or 0)
