"""One exchange between two workers, as a machine without sockets and clocks: what comes in, and what is to be done.

The initiator i shows its model as a point Q_i, the responder j answers with Q_j, the initiator says that it has it.
Then i moves by (Q_j - Q_i) / 2 and j by (Q_i - Q_j) / 2, whatever both have learnt meanwhile: the sum of the two models
is kept, to the rounding of the addition, and nothing that was learnt is lost.

The initiator moves when it has the answer, and decides thereby. The responder moves when it hears that, and asks if it
does not: only if the initiator cannot be heard any more (it is dead, or the link is cut for good) it goes on without
having moved. Then the sum has changed by at most |Q_i - Q_j| / 2, and by nothing if the initiator had not decided. No
message is sent twice without being asked for, and none counts twice.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from paceline.gossip.points import Points

__all__ = [
    "Abort",
    "Action",
    "Answer",
    "Ask",
    "Commit",
    "Correct",
    "Ended",
    "Message",
    "Outcome",
    "Peer",
    "Propose",
    "Refuse",
    "Send",
    "Wider",
]

ASKS = 4  # questions after a decision that has not come, each after the same time
REMEMBERED = 64  # decisions of the past that somebody may still ask for


class Propose(msgspec.Struct, frozen=True, tag=True):
    """Let us average; the payload is my point."""

    exchange: int
    bits: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    """I have your point; the payload is mine."""

    exchange: int
    bits: int


class Wider(msgspec.Struct, frozen=True, tag=True):
    """You are too far away for so few bits; show it again with more."""

    exchange: int
    bits: int


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


Message = Propose | Answer | Wider | Refuse | Commit | Abort | Ask


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
    """The partner, who decides, cannot be asked any more: nothing has moved here, maybe there."""


class Ended(NamedTuple):
    """An exchange is over, and this worker is free for another."""

    partner: int
    outcome: Outcome
    bits: int = 0
    """That it took; 0 if it came to nothing."""


Action = Send | Correct | Ended


@dataclass
class _Proposed:
    """This worker waits for an answer."""

    partner: int
    exchange: int
    model: Tensor
    point: Tensor
    bits: int
    patience: float
    until: float


@dataclass
class _Answered:
    """This worker waits for the decision."""

    partner: int
    exchange: int
    model: Tensor
    theirs: Tensor
    patience: float
    until: float
    points: dict[int, Tensor] = field(default_factory=dict)
    """What was shown, by bits."""
    asked: int = 0


class Peer:
    """A worker in exchanges with others, one at a time; ``member`` is its number.

    Every call gives what is to be done, in this order. ``first`` is the number of its first exchange, larger than any
    that it had before it was restarted.
    """

    def __init__(self, member: int, points: Points, first: int = 0) -> None:
        self._member, self._points = member, points
        self._state: _Proposed | _Answered | None = None
        self._next = first
        self._decided: dict[int, int] = {}
        self._last: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        """Whether an exchange is under way."""
        return self._state is not None

    @property
    def due(self) -> float | None:
        """When :meth:`tick` has something to do, unless something comes before."""
        return None if self._state is None else self._state.until

    def propose(self, partner: int, model: Tensor, patience: float, now: float) -> list[Action]:
        """Begin an exchange; an answer is waited for as long as ``patience``."""
        assert self._state is None, "one exchange at a time"
        exchange, self._next = self._next, self._next + 1
        return self._show(
            _Proposed(partner, exchange, model, model, 0, patience, now + patience), self._points.levels[0]
        )

    def receive(
        self, sender: int, message: Message, payload: Tensor | None, model: Tensor | None, patience: float, now: float
    ) -> list[Action]:
        """A message has come; ``model`` is what this worker could show now, if it could."""
        match message:
            case Propose():
                assert payload is not None
                return self._proposal(sender, message, payload, model, patience, now)
            case Answer():
                assert payload is not None
                return self._answer(sender, message, payload, now)
            case Wider():
                return self._wider(sender, message, now)
            case Refuse():
                state = self._proposed(sender, message.exchange)
                return [] if state is None else self._end(Outcome.REFUSED)
            case Commit() | Abort():
                return self._decision(sender, message)
            case Ask():
                return [Send(sender, self._say(message.exchange))]

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        state = self._state
        if state is None or now < state.until:
            return []
        if isinstance(state, _Proposed):
            return [Send(state.partner, Abort(state.exchange)), *self._end(Outcome.TIMED_OUT)]
        if state.asked == ASKS:
            return self._end(Outcome.UNKNOWN)
        state.asked += 1
        state.until = now + state.patience
        return [Send(state.partner, Ask(state.exchange))]

    def lost(self, partner: int) -> list[Action]:
        """A partner is known to be dead: nobody has to wait for it."""
        if self._state is None or self._state.partner != partner:
            return []
        return self._end(Outcome.TIMED_OUT if isinstance(self._state, _Proposed) else Outcome.UNKNOWN)

    def _show(self, state: _Proposed, bits: int) -> list[Action]:
        payload, state.point = self._points.encode(state.model, bits, state.exchange)
        state.bits = bits
        self._state = state
        return [Send(state.partner, Propose(state.exchange, bits), payload)]

    def _proposal(
        self, sender: int, message: Propose, payload: Tensor, model: Tensor | None, patience: float, now: float
    ) -> list[Action]:
        actions: list[Action] = []
        state = self._state
        if message.exchange <= self._last.get(sender, -1):  # a late copy of one that is over or under way
            return []
        if isinstance(state, _Proposed) and state.partner == sender and sender < self._member and model is not None:
            actions, state = self._end(Outcome.WITHDRAWN), None  # both have begun: the lower number goes on
        if state is not None or model is None:
            return [*actions, Send(sender, Refuse(message.exchange))]
        theirs = self._points.decode(payload, message.bits, model, message.exchange)
        if theirs is None:
            return [*actions, Send(sender, Wider(message.exchange, self._points.level_above(message.bits)))]
        self._last[sender] = message.exchange
        self._state = answered = _Answered(sender, message.exchange, model, theirs, patience, now + patience)
        return [*actions, *self._reply(answered, message.bits)]

    def _reply(self, state: _Answered, bits: int) -> list[Action]:
        payload, state.points[bits] = self._points.encode(state.model, bits, ~state.exchange)
        return [Send(state.partner, Answer(state.exchange, bits), payload)]

    def _answer(self, sender: int, message: Answer, payload: Tensor, now: float) -> list[Action]:
        state = self._proposed(sender, message.exchange)
        if state is None:  # too late, or a copy
            return [Send(sender, self._say(message.exchange))]
        theirs = self._points.decode(payload, message.bits, state.model, ~message.exchange)
        if theirs is None:
            state.until = now + state.patience
            return [Send(sender, Wider(message.exchange, self._points.level_above(message.bits)))]
        self._decided[state.exchange] = message.bits
        while len(self._decided) > REMEMBERED:
            del self._decided[next(iter(self._decided))]
        return [
            Correct(_half(theirs, state.point)),
            Send(sender, Commit(state.exchange, message.bits)),
            *self._end(Outcome.DONE, max(message.bits, state.bits)),
        ]

    def _wider(self, sender: int, message: Wider, now: float) -> list[Action]:
        state = self._state
        if state is None or state.partner != sender or state.exchange != message.exchange:
            return []
        if message.bits not in self._points.levels:
            return []
        state.until = now + state.patience
        if isinstance(state, _Proposed):
            return self._show(state, message.bits) if message.bits > state.bits else []
        return self._reply(state, message.bits) if message.bits not in state.points else []

    def _decision(self, sender: int, message: Commit | Abort) -> list[Action]:
        state = self._state
        if not isinstance(state, _Answered) or (state.partner, state.exchange) != (sender, message.exchange):
            return []
        if isinstance(message, Abort):
            return self._end(Outcome.TIMED_OUT)
        point = state.points.get(message.bits)
        if point is None:  # never shown: nobody can have moved by it
            return []
        return [Correct(_half(state.theirs, point)), *self._end(Outcome.DONE, max(state.points))]

    def _proposed(self, sender: int, exchange: int) -> _Proposed | None:
        state = self._state
        mine = isinstance(state, _Proposed) and (state.partner, state.exchange) == (sender, exchange)
        return state if mine and isinstance(state, _Proposed) else None

    def _say(self, exchange: int) -> Commit | Abort:
        """What this worker has decided; what it has not decided for, it will not."""
        bits = self._decided.get(exchange)
        return Abort(exchange) if bits is None else Commit(exchange, bits)

    def _end(self, outcome: Outcome, bits: int = 0) -> list[Action]:
        assert self._state is not None
        partner, self._state = self._state.partner, None
        return [Ended(partner, outcome, bits)]


def _half(theirs: Tensor, own: Tensor) -> Tensor:
    """Half of the way: to the bit the opposite of what the partner computes."""
    return torch.sub(theirs, own).mul_(0.5)
