"""Letters: what comes back as it was, and what is refused."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch

from paceline.gossip.members import News, State
from paceline.gossip.messages import Agreed, Hello, Propose
from paceline.gossip.wire import HEADER_LIMIT, Card, decode, encode

CARD = Card("a run", "a model")
OWN = News(3, "tcp://10.0.0.3:29600", 2, State.HERE, 640)


def header(card: Card = CARD, own: News = OWN, **changes: object) -> bytes:
    raw = encode(card, own, 5000, [own], Propose(7, 8), lost=70)
    if not changes:
        return raw
    fields = msgspec.msgpack.decode(raw)
    for name, value in changes.items():
        fields[int(name[1:])] = value
    return msgspec.msgpack.encode(fields)


def test_a_letter_comes_back_as_it_was() -> None:
    payload = bytes(range(256))
    letter = decode(CARD, [header(), payload])
    assert letter is not None
    assert letter.header.message == Propose(7, 8)
    assert letter.header.news == [OWN]
    assert (letter.header.sender, letter.header.life, letter.header.examples) == (3, 2, 5000)
    assert letter.header.lost == 70
    assert letter.payload is not None
    assert letter.payload.tolist() == list(payload)
    letter.payload[0] = 9  # it is its own memory
    without = decode(CARD, [encode(CARD, OWN, 0, [], Agreed([1, 2]))])
    assert without is not None
    assert without.payload is None


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"garbage", b""],
        [b"\x91" * 10_000],  # an array in an array in an array
        [header(_1="\ud800".encode("utf-8", "surrogatepass"))],
        [header(Card("another run", "a model"))],
        [header(Card("a run", "another model"))],
        [header(), b"", b"one too many"],
        [b"\xdc" + b"\x00" * HEADER_LIMIT],
        [header(_0=2)],  # another format
        [header(_3=-1)],  # a member before the first
        [header(_3=1 << 40)],
        [header(_4=1 << 60)],  # a life that no exchange could be numbered in
        [header(_5=-5)],
        [header(_8=-5)],
        [header(_6=[msgspec.to_builtins(OWN)] * 33)],  # more news than a member tells
        [header(_6=[{**msgspec.to_builtins(OWN), "address": "ipc:///tmp/evil"}])],
        [header(_6=[{**msgspec.to_builtins(OWN), "address": "tcp://host:1\n"}])],
        [header(_6=[{**msgspec.to_builtins(OWN), "state": "king"}])],
        [header(_7={"type": "Propose", "exchange": "seven", "bits": 8})],
        [header(_7={"type": "Destroy"})],
        [header(_7={**msgspec.to_builtins(Hello(True)), "reply": 3})],
    ],
)
def test_what_is_no_letter_of_this_run_is_refused(frames: list[bytes]) -> None:
    assert decode(CARD, frames) is None


def test_mutated_letters_are_refused_or_are_letters() -> None:
    """Never an error, whatever comes."""
    chance, whole = random.Random(0), header()
    refused = 0
    for _ in range(20_000):
        frame = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            match chance.randrange(3):
                case 0:
                    frame[chance.randrange(len(frame))] = chance.randrange(256)
                case 1:
                    del frame[chance.randrange(len(frame)) :]
                    frame = frame or bytearray(b"x")
                case _:
                    frame.insert(chance.randrange(len(frame) + 1), chance.randrange(256))
        refused += decode(CARD, [bytes(frame), b"abc"]) is None
    assert refused > 15_000


def test_a_payload_may_have_any_length() -> None:
    letter = decode(CARD, [header(), b"abc"])
    assert letter is not None
    assert torch.equal(
        letter.payload if letter.payload is not None else torch.empty(0), torch.tensor(list(b"abc")).byte()
    )
