"""Who is heard: the keys of a run, which its workers hand to each other when it begins."""

from __future__ import annotations

import uuid

import msgspec
import zmq

from paceline.errors import FleetError, SettingError
from paceline.fleet import Fleet

__all__ = ["Keys", "Secret", "make_secret", "share_secret"]


class Keys(msgspec.Struct, frozen=True):
    """A CURVE key pair that all workers of a run have, and nobody else.

    Every worker proves with it that it belongs to the run, and demands the same proof; what they say is encrypted.
    """

    public: str
    secret: str

    def __repr__(self) -> str:
        return "Keys(…)"  # it must not come into logs


class Secret(msgspec.Struct, frozen=True):
    """What tells workers of this run from all others."""

    run: str
    keys: Keys | None
    """None where anybody is heard who can reach the socket and knows the run's name."""


def make_secret(plain: bool) -> Secret:
    """A new one."""
    if plain:
        return Secret(uuid.uuid4().hex, None)
    if not zmq.has("curve"):
        raise SettingError(
            "this build of ZeroMQ has no encryption (CURVE), so that strangers could not be kept out; install pyzmq "
            "from a wheel, or say Gossip(plain=True) in a network where everybody is trusted"
        )
    public, secret = zmq.curve_keypair()
    return Secret(uuid.uuid4().hex, Keys(public.decode(), secret.decode()))


def share_secret(fleet: Fleet, plain: bool) -> Secret:
    """Rank 0's, on all workers: it travels through torch's store, which is trusted at the start."""
    own = msgspec.json.encode(make_secret(plain)) if fleet.rank == 0 else b""
    first = fleet.gather(own, "the key of the run")[0]
    try:
        return msgspec.json.decode(first, type=Secret)
    except msgspec.DecodeError as error:
        raise FleetError(f"rank 0's key of the run cannot be read ({error}); start all workers again") from error
