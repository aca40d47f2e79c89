"""Letters as bytes: a typed header that is checked field by field, and a payload that is only numbers. No pickle."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from paceline.gossip.members import News
from paceline.gossip.messages import Errand, Message

__all__ = ["HEADER_LIMIT", "Card", "Header", "Letter", "decode", "encode"]

FORMAT = 1  # of the header; a peer that writes another is not heard
HEADER_LIMIT = 16_384  # bytes: news of a few members, with room

Whole = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Card(msgspec.Struct, frozen=True):
    """What all workers of a run have in common."""

    run: str
    """Made up when the run begins."""
    model: str
    """A digest of the shapes of the model, and of the codec: who has another cannot average with us."""


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What stands before the payload of every letter."""

    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)]
    run: Annotated[str, Meta(max_length=64)]
    model: Annotated[str, Meta(max_length=64)]
    sender: Annotated[int, Meta(ge=0, lt=1 << 31)]
    life: Annotated[int, Meta(ge=0, lt=1 << 38)]
    examples: Whole
    """That all members have used, as far as the sender knows."""
    news: Annotated[list[News], Meta(max_length=32)]
    message: Message | Errand
    lost: Annotated[int, Meta(ge=0, lt=1 << 56)]
    """Of the examples, those that no member counts as its own."""


class Letter(NamedTuple):
    """Something to be sent, or that has come."""

    header: Header
    payload: Tensor | None
    """Of uint8."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode(card: Card, own: News, examples: int, news: list[News], message: Message | Errand, lost: int = 0) -> bytes:
    """The bytes of a header."""
    header = Header(FORMAT, card.run, card.model, own.number, own.life, examples, news, message, lost)
    return _encoder.encode(header)


def decode(card: Card, frames: list[bytes]) -> Letter | None:
    """A letter of a worker of this run; None for everything else, whatever it may be."""
    if not 1 <= len(frames) <= 2 or len(frames[0]) > HEADER_LIMIT:
        return None
    try:
        header = _decoder.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if (header.run, header.model) != (card.run, card.model):
        return None
    payload = torch.frombuffer(bytearray(frames[1]), dtype=torch.uint8) if len(frames) == 2 and frames[1] else None
    return Letter(header, payload)
