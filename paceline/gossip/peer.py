"""One exchange between two workers, as a machine without sockets and clocks: what comes in, and what is to be done.

The initiator i shows its model as a point Q_i, the responder j answers with Q_j, the initiator says that it has it.
Then i moves by (Q_j - Q_i) / 2 and j by (Q_i - Q_j) / 2, whatever both have learnt meanwhile: the sum of the two models
is kept, to the rounding of the addition, and nothing that was learnt is lost.

The initiator moves when it has the answer, and decides thereby. The responder moves when it hears that, and asks if it
does not. After a few questions in vain it is free for others, but goes on asking, and moves however late it hears: a
move is an addition, which is as right then as before. Only if the initiator never comes back, or the responder dies,
has one side moved and the other not. Then the sum has changed by at most |Q_i - Q_j| / 2. No message is sent twice
without being asked for, and none counts twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.gossip.messages import (
    Abort,
    Action,
    Answer,
    Ask,
    Commit,
    Correct,
    Ended,
    Message,
    Outcome,
    Propose,
    Refuse,
    Send,
    Wider,
)
from paceline.gossip.points import Points

__all__ = ["Peer"]

ASKS = 4  # questions after a decision that has not come, each after the same time; then one is free for others
SELDOM = 8  # times the patience between two questions after that
UNSURE = 4  # exchanges whose decision may be open at once, beside the present one: each takes as much as a model
REMEMBERED = 4096  # decisions for each partner that it may still ask for, a few numbers each


@dataclass
class _Proposed:
    """This worker waits for an answer."""

    partner: int
    exchange: int
    model: Tensor
    patience: float
    until: float
    points: dict[int, Tensor] = field(default_factory=dict)
    """What was shown, by bits."""


@dataclass
class _Answered:
    """This worker waits for the decision."""

    partner: int
    exchange: int
    model: Tensor
    theirs: Tensor
    of: int
    """The bits of the point that it has."""
    patience: float
    until: float
    moves: dict[int, Tensor] = field(default_factory=dict)
    """What to move by, by the bits of what was shown."""
    asked: int = 0


class Peer:
    """A worker in exchanges with others, one at a time; ``member`` is its number.

    Every call gives what is to be done, in this order. ``life`` grows every time that the worker is started; exchanges
    of an earlier one are not mistaken for those of this one.
    """

    def __init__(self, member: int, points: Points, life: int = 0) -> None:
        self._member, self._points, self._life = member, points, life
        self._state: _Proposed | _Answered | None = None
        self._unsure: list[_Answered] = []
        self._next = life << 24
        self._decided: dict[int, dict[int, tuple[int, int]]] = {}
        self._last: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        """Whether an exchange is under way."""
        return self._state is not None

    @property
    def unsure(self) -> tuple[int, ...]:
        """The partners that have not said yet how an exchange ended that is no longer waited for."""
        return tuple(each.partner for each in self._unsure)

    @property
    def due(self) -> float | None:
        """When :meth:`tick` has something to do, unless something comes before."""
        times = [each.until for each in (self._state, *self._unsure) if each is not None]
        return min(times, default=None)

    def propose(self, partner: int, model: Tensor, patience: float, now: float) -> list[Action]:
        """Begin an exchange; an answer is waited for as long as ``patience``."""
        assert self._state is None, "one exchange at a time"
        exchange, self._next = self._next, self._next + 1
        self._state = state = _Proposed(partner, exchange, model, patience, now + patience)
        return self._show(state, self._points.levels[0])

    def receive(
        self, sender: int, message: Message, payload: Tensor | None, model: Tensor | None, patience: float, now: float
    ) -> list[Action]:
        """A message has come; ``model`` is what this worker could show now, if it could."""
        match message:
            case Propose():
                if payload is None or not self._points.fits(message.bits, payload):
                    return [Send(sender, Refuse(message.exchange))]
                return self._proposal(sender, message, payload, model, patience, now)
            case Answer():
                if payload is None or not self._points.fits(message.bits, payload):
                    return []
                return self._answer(sender, message, payload, now)
            case Wider():
                return self._wider(sender, message, now)
            case Refuse():
                state = self._proposed(sender, message.exchange)
                return [] if state is None else self._end(Outcome.REFUSED)
            case Commit() | Abort():
                return self._decision(sender, message)
            case Ask():
                # As long as it is open, the decision is to come.
                undecided = self._proposed(sender, message.exchange) is not None
                return [] if undecided else [self._say(sender, message.exchange, message.life)]

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        actions: list[Action] = []
        for waiting in self._unsure:
            if now >= waiting.until:
                waiting.until = now + SELDOM * waiting.patience
                actions.append(Send(waiting.partner, Ask(waiting.exchange, self._life)))
        state = self._state
        if state is None or now < state.until:
            return actions
        if isinstance(state, _Proposed):
            return [*actions, Send(state.partner, Abort(state.exchange)), *self._end(Outcome.TIMED_OUT)]
        if state.asked == ASKS:
            state.until = now + SELDOM * state.patience
            state.model = state.theirs = torch.empty(0)  # only what to move by is needed from now on
            self._unsure = [*self._unsure, state][-UNSURE:]
            return [*actions, *self._end(Outcome.UNKNOWN)]
        state.asked += 1
        state.until = now + state.patience
        return [*actions, Send(state.partner, Ask(state.exchange, self._life))]

    def lost(self, partner: int) -> list[Action]:
        """A partner is known to be dead, or in a new life: nobody has to wait for it, or to ask it any more."""
        self._unsure = [each for each in self._unsure if each.partner != partner]
        if self._state is None or self._state.partner != partner:
            return []
        return self._end(Outcome.TIMED_OUT if isinstance(self._state, _Proposed) else Outcome.UNKNOWN)

    def _show(self, state: _Proposed, bits: int) -> list[Action]:
        seed = _seed(self._member, state.exchange, answer=False)
        payload, state.points[bits] = self._points.encode(state.model, bits, seed)
        return [Send(state.partner, Propose(state.exchange, bits), payload)]

    def _proposal(
        self, sender: int, message: Propose, payload: Tensor, model: Tensor | None, patience: float, now: float
    ) -> list[Action]:
        actions: list[Action] = []
        state, exchange = self._state, message.exchange
        if exchange <= self._last.get(sender, -1):  # a late copy of one that is over or under way
            return []
        if isinstance(state, _Proposed) and state.partner == sender and sender < self._member and model is not None:
            actions, state = self._end(Outcome.WITHDRAWN), None  # both have begun: the lower number goes on
        if state is not None or model is None:
            return [*actions, Send(sender, Refuse(exchange))]
        theirs = self._points.decode(payload, message.bits, model, _seed(sender, exchange, answer=False))
        if theirs is None:
            wider = self._points.level_above(message.bits)
            more = Refuse(exchange) if wider is None else Wider(exchange, wider, answer=False)
            return [*actions, Send(sender, more)]
        self._last[sender] = exchange
        self._state = answered = _Answered(sender, exchange, model, theirs, message.bits, patience, now + patience)
        return [*actions, *self._reply(answered, message.bits)]

    def _reply(self, state: _Answered, bits: int) -> list[Action]:
        seed = _seed(state.partner, state.exchange, answer=True)
        payload, point = self._points.encode(state.model, bits, seed)
        state.moves[bits] = _half(state.theirs, point)
        return [Send(state.partner, Answer(state.exchange, bits, state.of, self._life), payload)]

    def _answer(self, sender: int, message: Answer, payload: Tensor, now: float) -> list[Action]:
        state = self._proposed(sender, message.exchange)
        if state is None:  # too late, or a copy
            return [self._say(sender, message.exchange, message.life)]
        point = state.points.get(message.of)
        if point is None:  # never shown: it cannot be an answer
            return []
        seed = _seed(self._member, message.exchange, answer=True)
        theirs = self._points.decode(payload, message.bits, state.model, seed)
        if theirs is None:
            wider = self._points.level_above(message.bits)
            if wider is None:
                return [Send(sender, Abort(message.exchange)), *self._end(Outcome.REFUSED)]
            state.until = now + state.patience
            return [Send(sender, Wider(message.exchange, wider, answer=True))]
        decided = self._decided.setdefault(sender, {})
        decided[state.exchange] = message.bits, message.life
        while len(decided) > REMEMBERED:
            del decided[min(decided)]
        return [
            Correct(_half(theirs, point)),
            Send(sender, Commit(state.exchange, message.bits)),
            *self._end(Outcome.DONE, max(message.bits, message.of)),
        ]

    def _wider(self, sender: int, message: Wider, now: float) -> list[Action]:
        state = self._state
        if state is None or (state.partner, state.exchange) != (sender, message.exchange):
            return []
        if message.bits not in self._points.levels:
            return []
        if isinstance(state, _Proposed):
            if message.answer or message.bits in state.points:
                return []
            state.until = now + state.patience
            return self._show(state, message.bits)
        if not message.answer or message.bits in state.moves:
            return []
        state.until = now + state.patience
        return self._reply(state, message.bits)

    def _decision(self, sender: int, message: Commit | Abort) -> list[Action]:
        for waiting in (self._state, *self._unsure):
            if isinstance(waiting, _Answered) and (waiting.partner, waiting.exchange) == (sender, message.exchange):
                break
        else:
            return []
        if isinstance(message, Commit) and message.bits not in waiting.moves:
            return []  # never shown: nobody can have moved by it
        late = waiting is not self._state
        moves: list[Action] = [] if isinstance(message, Abort) else [Correct(waiting.moves[message.bits])]
        if late:
            self._unsure = [each for each in self._unsure if each is not waiting]
            return [*moves, Ended(sender, Outcome.LATE, message.bits)] if isinstance(message, Commit) else []
        if isinstance(message, Abort):
            return self._end(Outcome.TIMED_OUT)
        return [*moves, *self._end(Outcome.DONE, max(message.bits, waiting.of))]

    def _proposed(self, sender: int, exchange: int) -> _Proposed | None:
        state = self._state
        if isinstance(state, _Proposed) and (state.partner, state.exchange) == (sender, exchange):
            return state
        return None

    def _say(self, to: int, exchange: int, life: int) -> Send:
        """What this worker has decided about an answer of that life; what it has not decided for, it never will."""
        bits, whose = self._decided.get(to, {}).get(exchange, (0, life))
        return Send(to, Commit(exchange, bits) if bits and whose == life else Abort(exchange))

    def _end(self, outcome: Outcome, bits: int = 0) -> list[Action]:
        assert self._state is not None
        partner, self._state = self._state.partner, None
        return [Ended(partner, outcome, bits)]


def _seed(initiator: int, exchange: int, answer: bool) -> int:
    """For a dithered lattice: another for every point, and both sides know it."""
    return ((2 * exchange + answer) * 1_000_003 + initiator) % (1 << 63)


def _half(theirs: Tensor, own: Tensor) -> Tensor:
    """Half of the way: to the bit the opposite of what the partner computes."""
    return torch.sub(theirs, own).mul_(0.5)
