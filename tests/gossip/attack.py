"""Somebody who wants to disturb a run: sends its workers all that is no letter, with the run's key and without."""

from __future__ import annotations

import random
import socket
import time
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from paceline.gossip.invitation import Invitation, accept
from paceline.gossip.keys import Keys, make_secret
from paceline.gossip.members import News, State
from paceline.gossip.messages import (
    Abort,
    Agreed,
    Answer,
    Ask,
    Await,
    Commit,
    Errand,
    Fetch,
    Got,
    Hello,
    Later,
    Message,
    Model,
    Propose,
    Refuse,
    Wider,
)
from paceline.gossip.sockets import Sockets
from paceline.gossip.wire import HEADER_LIMIT, Card, decode, encode

LIMIT = 90.0  # seconds that one attack may take
LONG = 10_000_000  # bytes: more than any worker of the run may send
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47)  # how ZMTP begins (rfc.zeromq.org/spec/23)
SENDER = 9  # no member of the run; it says that it wants to join, so that nobody averages with it


class Sent(msgspec.Struct):
    """What one worker was sent."""

    refused: int = 0
    """Letters that came through with the run's key, and must not be heard."""
    nonsense: int = 0
    """Letters that are well-formed, of the right run and model, and mean nothing."""
    strangers: int = 0
    """Connections without the run's key, or with what is no ZeroMQ at all."""
    oversized: int = 0


def attack(path: Path, card: Card, count: int, seed: int) -> list[Sent]:
    """Send so many frames to every worker that the invitation tells of, as soon as there is one."""
    end = time.monotonic() + LIMIT
    while (invitation := accept(path)) is None:
        assert time.monotonic() < end, "there is no invitation"
        time.sleep(0.01)
    return [
        Attacker(invitation, card, at, random.Random(1000 * seed + at), end).run(count)
        for at in range(len(invitation.addresses))
    ]


class Attacker:
    """Disturbs one worker."""

    def __init__(self, invitation: Invitation, card: Card, at: int, chance: random.Random, end: float) -> None:
        self._invitation, self._card, self._chance, self._end = invitation, card, chance, end
        self._address = invitation.addresses[at]
        # Another number for each worker: of what the first has heard, the second hears, too.
        self._own = News(SENDER + at, "tcp://127.0.0.1:9", 0, State.JOINING, 0)

    def run(self, count: int) -> Sent:
        """All kinds in a random order."""
        sent, keys = Sent(), self._invitation.secret.keys
        with ExitStack() as opened:
            mouth = opened.enter_context(closing(Sockets("127.0.0.1", keys, LONG)))
            other = opened.enter_context(closing(Sockets("127.0.0.1", make_secret(plain=False).keys, LONG)))
            nobody = opened.enter_context(closing(Sockets("127.0.0.1", None, LONG)))
            for _ in range(count):
                kind = self._chance.random()
                if kind < 0.01:
                    self._raw()
                    sent.strangers += 1
                elif kind < 0.012:
                    self._oversized(keys)
                    sent.oversized += 1
                elif kind < 0.03:  # what cannot be handed over is dropped: nobody takes it at the other end
                    (other if kind < 0.02 else nobody).send(self._address, [self._header(self._card)])
                    sent.strangers += 1
                elif kind < 0.8:
                    self._hand_over(mouth, self._refused())
                    sent.refused += 1
                else:
                    self._hand_over(mouth, [self._header(self._card), self._noise(300)])
                    sent.nonsense += 1
            self._leave(mouth)
        return sent

    def _hand_over(self, mouth: Sockets, frames: list[bytes]) -> None:
        while not mouth.send(self._address, frames):
            assert time.monotonic() < self._end, "a worker does not take letters any more"
            time.sleep(0.0005)

    def _leave(self, mouth: Sockets) -> None:
        """A letter that is heard, after all the others."""
        own = msgspec.structs.replace(self._own, life=1, state=State.LEFT)
        self._hand_over(mouth, [encode(self._card, own, 0, [own], Hello(reply=False))])
        time.sleep(0.2)  # closing would let the last letters leave for a second at most

    def _refused(self) -> list[bytes]:
        """Something that is no letter of this run, by the way it was made."""
        header = self._header(self._card)
        match self._chance.randrange(6):
            case 0:
                return [self._noise(2000) for _ in range(self._chance.randrange(1, 5))]
            case 1:
                return [header[: self._chance.randrange(len(header))]]
            case 2:
                return [self._broken(header), self._noise(300)]
            case 3:  # too long for a header, but not for libzmq, which would close the connection
                return [header.ljust(HEADER_LIMIT + self._chance.randrange(1, 500), b"?")]
            case 4:
                return [header, self._noise(300), self._noise(300)]
            case _:
                another = self._chance.choice([Card("another run", self._card.model), Card(self._card.run, "model")])
                return [self._header(another), self._noise(300)]

    def _broken(self, header: bytes) -> bytes:
        """A mutant that is no letter: some are, and who has the key is believed."""
        while decode(self._card, [mutant := self._mutated(header)]) is not None:
            pass
        return mutant

    def _mutated(self, header: bytes) -> bytes:
        found = bytearray(header)
        for _ in range(self._chance.randrange(1, 9)):
            at = self._chance.randrange(len(found))
            match self._chance.randrange(3):
                case 0:
                    found[at] ^= self._chance.randrange(1, 256)
                case 1:
                    found.insert(at, self._chance.randrange(256))
                case _:
                    del found[at]
        return bytes(found)

    def _header(self, card: Card) -> bytes:
        number, bits = (
            self._chance.choice([0, 1, -1, 5, 1 << 40, (1 << 63) - 1]),
            self._chance.choice([0, -8, 8, 16, 32]),
        )
        messages: list[Message | Errand] = [
            Propose(number, bits),
            Answer(number, bits, bits, 0),
            Wider(number, bits, answer=bool(number % 2)),
            Refuse(number),
            Commit(number, bits),
            Abort(number),
            Ask(number, 0),
            Hello(reply=True),
            Fetch(number, final=bool(number % 2)),
            Model(number, 5),
            Later(number),
            Await(number),
            Agreed([SENDER]),
            Got(),
        ]
        return encode(card, self._own, 0, [self._own], self._chance.choice(messages))

    def _noise(self, longest: int) -> bytes:
        return self._chance.randbytes(self._chance.randrange(1, longest))

    def _raw(self) -> None:
        """Bytes to the port itself, with and without the beginning that ZeroMQ expects."""
        host, port = self._address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=LIMIT) as connection:
            begin = self._chance.choice([b"", GREETING, self._mutated(GREETING), b"GET / HTTP/1.1\r\n\r\n"])
            connection.sendall(begin + self._noise(500))

    def _oversized(self, keys: Keys | None) -> None:
        """A connection of its own, since it does not survive that."""
        with closing(Sockets("127.0.0.1", keys, LONG)) as mouth:
            self._hand_over(mouth, [self._header(self._card), bytes(LONG)])
