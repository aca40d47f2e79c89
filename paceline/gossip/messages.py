"""What two workers say to each other, in an exchange and beside it, and what comes of it for one of them."""

from __future__ import annotations

import enum
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta
from torch import Tensor

__all__ = [
    "Abort",
    "Action",
    "Agreed",
    "Answer",
    "Ask",
    "Await",
    "Commit",
    "Correct",
    "Ended",
    "Errand",
    "Fetch",
    "Got",
    "Hello",
    "Later",
    "Message",
    "Model",
    "Outcome",
    "Propose",
    "Refuse",
    "Send",
    "Wider",
]


class Propose(msgspec.Struct, frozen=True, tag=True):
    """Let us average; the payload is my point."""

    exchange: int
    bits: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    """I have your point; the payload is mine."""

    exchange: int
    bits: int
    of: int
    """The bits of the point that it answers."""
    life: int
    """Of who answers."""


class Wider(msgspec.Struct, frozen=True, tag=True):
    """You are too far away for so few bits; show it again with more."""

    exchange: int
    bits: int
    answer: bool
    """Whether it is the answer that is to be shown again, or the proposal."""


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """Not now: I am busy, or have nothing to show."""

    exchange: int


class Commit(msgspec.Struct, frozen=True, tag=True):
    """I have moved by the point that you have shown in so many bits; do so, too."""

    exchange: int
    bits: int


class Abort(msgspec.Struct, frozen=True, tag=True):
    """I have not moved and will not; neither must you."""

    exchange: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Have you moved?"""

    exchange: int
    life: int
    """Of who asks: in another life it has not answered."""


Message = Propose | Answer | Wider | Refuse | Commit | Abort | Ask


class Hello(msgspec.Struct, frozen=True, tag=True):
    """I am here, or leave, or have come to the end: see the news that travel with every message."""

    reply: bool
    """Whether to say hello, too."""


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Give me your whole model."""

    number: int
    """Of the question, so that a late answer is not taken for one to the next."""
    final: bool
    """As it is when you have come to the end, not as it is now."""


class Model(msgspec.Struct, frozen=True, tag=True):
    """It is the payload."""

    number: int
    weight: Annotated[int, Meta(ge=0, lt=1 << 56)]
    """The examples that it stands for."""


class Later(msgspec.Struct, frozen=True, tag=True):
    """I am alive, but have nothing to give yet."""

    number: int
    away: bool = False
    """Nor will I have: my trainer has left its loop."""


class Await(msgspec.Struct, frozen=True, tag=True):
    """Have you put together the average of all at the end?"""

    number: int


class Agreed(msgspec.Struct, frozen=True, tag=True):
    """This is the average of all at the end: the payload."""

    members: list[int]
    """Whose models are in it."""


class Got(msgspec.Struct, frozen=True, tag=True):
    """I have it."""


Errand = Hello | Fetch | Model | Later | Await | Agreed | Got


class Send(NamedTuple):
    """Send a message."""

    to: int
    message: Message
    payload: Tensor | None = None


class Correct(NamedTuple):
    """Add this to the model between two steps."""

    change: Tensor


class Outcome(enum.Enum):
    """How an exchange ended for this worker."""

    DONE = "done"
    REFUSED = "refused"
    TIMED_OUT = "timed out"
    """Nothing has moved here."""
    WITHDRAWN = "withdrawn"
    """For the partner's own proposal, which came at the same time."""
    UNKNOWN = "unknown"
    """The partner, who decides, does not say: nothing has moved here yet, maybe there."""
    LATE = "late"
    """What was unknown was done at last."""


class Ended(NamedTuple):
    """An exchange is over, and this worker is free for another."""

    partner: int
    outcome: Outcome
    bits: int = 0
    """That it took; 0 if it came to nothing."""


Action = Send | Correct | Ended
