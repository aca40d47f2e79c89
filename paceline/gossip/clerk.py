"""What one worker does among the others, without sockets and clocks: letters in, letters out.

The trainer shows its model on the board, says when it would like to average (:meth:`Clerk.offer`) and when it has come
to the end; everything else is done here: with whom, what if there is no answer, who asks for the whole model, who takes
part. Times are handed in, so that a test can steer them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from paceline.gossip.board import Board
from paceline.gossip.counts import Counts
from paceline.gossip.finale import Finale, Parcel, Whole
from paceline.gossip.gathering import Gathering
from paceline.gossip.joining import Joining
from paceline.gossip.members import Members, State
from paceline.gossip.messages import (
    Action,
    Agreed,
    Answer,
    Await,
    Correct,
    Ended,
    Errand,
    Fetch,
    Got,
    Hello,
    Later,
    Message,
    Model,
    Outcome,
    Send,
)
from paceline.gossip.peer import Peer
from paceline.gossip.points import Points
from paceline.gossip.search import Search
from paceline.gossip.wire import Letter

__all__ = ["Clerk", "Outgoing"]

NEWS = 0.25  # seconds between letters that only tell news, to one member each: exchanges may be seldom
LONGEST = 30.0  # seconds that are waited for a whole model at first, however long coded ones have taken


class Outgoing(NamedTuple):
    """A letter to be sent."""

    address: str
    message: Message | Errand
    payload: Tensor | None = None


class Clerk:
    """Serves one trainer. ``contacts`` are addresses of a swarm that trains already; none at the start of a run.

    With ``blocking`` the trainer stands still from its offer on until one exchange is done, whoever began it; only then
    can its model be averaged. Otherwise it can at any time, and what comes of it is added between steps.
    """

    def __init__(
        self,
        members: Members,
        points: Points,
        board: Board,
        whole: Whole,
        counters: Tensor,
        *,
        blocking: bool = False,
        contacts: Sequence[str] = (),
        now: float = 0.0,
    ) -> None:
        self.members, self.board, self.whole, self.counts = members, board, whole, Counts()
        self.counters = counters
        """Whole numbers that belong to the model; whoever takes it gets them."""
        self.outbox: list[Outgoing] = []
        self._points, self._blocking = points, blocking
        self._peer = Peer(members.own.number, points, members.own.life)
        self._open = self._away = False
        self._search = Search()
        self._news = now
        self.gathering: Gathering | None = None
        self.finale: Finale | None = None
        self._heard: set[int] = set()
        self._questions, self._longest = 0, LONGEST
        joins = members.own.state is State.JOINING
        self.joining = Joining(members, whole, contacts, self._patience_for_whole, now) if joins else None

    def hurry(self, deadline: float) -> None:
        """Nothing is waited for longer: in that time a whole model can be asked for twice, and left out."""
        self._longest = min(LONGEST, deadline / 4)

    def begin(self) -> None:
        """The model on the board is one of the swarm: it may be averaged with others."""
        self.members.tell(State.HERE)
        self._open, self._away = not self._blocking, False
        self._greet()

    def offer(self, examples: int) -> None:
        """The trainer would like to average now; it has used so many examples."""
        self.tell(examples)
        self._open = True
        self._search.begin()

    def tell(self, examples: int) -> None:
        """The trainer has used so many examples."""
        self.members.tell(examples=examples)

    def rest(self) -> None:
        """The trainer has left its loop: its model is not averaged any more, unless it comes back."""
        self._search.give_up()
        self._open, self._away = False, True

    def end(self) -> None:
        """The trainer has come to the end, and tells all others; what is under way is finished."""
        self._search.give_up()
        self._open = self._away = False
        self.members.tell(State.DONE)
        self._greet()

    def freeze(self, numbers: Tensor) -> None:
        """This is the final model."""
        self.finale = Finale(self.members, self.whole, numbers, self.counters, self._patience_for_whole())

    def gather(self) -> None:
        """Put together the average of all models as they are now: :attr:`gathering`."""
        own = self.board.copy()
        assert own is not None, "a model is shown before"
        self._questions += 1
        how = self._questions, self.members.own.number, own, self.members.own.examples
        patience, extent = self._patience_for_whole(), (self.whole.trained, self.whole.measured)
        self.gathering = Gathering(*how, final=False, patience=patience, extent=extent)
        for other in self.members.others(State.HERE, State.DONE):
            if other not in self.members.silent():
                self.gathering.include(other, now=0.0)

    def leave(self) -> None:
        """Say goodbye."""
        self.rest()
        self.members.tell(State.LEFT)
        self._greet()

    def meet(self) -> None:
        """Greet everybody: who can be reached answers."""
        for other in self.unmet:
            self._post(other, Hello(reply=True))

    @property
    def unmet(self) -> list[int]:
        """The others that nothing was heard of yet."""
        return [each for each in self.members.others(State.JOINING, State.HERE, State.DONE) if each not in self._heard]

    @property
    def wishes(self) -> bool:
        """Whether the trainer would like to average, and has not yet."""
        return self._search.goes_on

    @property
    def idle(self) -> bool:
        """Whether no exchange is under way."""
        return not self._peer.busy

    @property
    def over(self) -> bool:
        """Whether somebody has come to the end: then all have."""
        return bool(self.members.others(State.DONE))

    def receive(self, letter: Letter, now: float) -> None:
        """A letter has come."""
        header, sender = letter.header, letter.header.sender
        known = self.members.life(sender)
        if sender == self.members.own.number or header.life < known:
            return
        if header.life > known >= 0:
            self._do(self._peer.lost(sender), now)
        self.members.hear(header.news)
        self.members.hear_of_all(header.examples, header.lost)
        if self.members.life(sender) < 0:  # it does not even say where it listens
            return
        seconds = self._search.seconds(sender, now) if isinstance(header.message, Answer) else None
        self.members.answered(sender, seconds)
        self._heard.add(sender)
        self._dispatch(sender, header.message, letter.payload, now)

    def _dispatch(self, sender: int, message: Message | Errand, payload: Tensor | None, now: float) -> None:
        match message:
            case Hello():
                if message.reply:
                    self._post(sender, Hello(reply=False))
            case Fetch(final=False):
                self._post(sender, *self._whole_model(message.number))
            case Model() | Later() if self.joining is not None and self.members.own.state is State.JOINING:
                self.joining.receive(sender, message, payload)
            case Model() | Later() if self.finale is None:
                if self.gathering is not None:
                    self.gathering.receive(sender, message, payload, self.whole, now)
            case Fetch() | Await() | Agreed() | Got() | Model() | Later():
                if self.finale is not None:
                    self._send(self.finale.receive(sender, message, payload, now))
                elif isinstance(message, Fetch | Await):
                    self._post(sender, Later(message.number, self._away))
            case _ if self.finale is None:  # the final model is not changed any more
                shown = self.board.lend() if self._open else None
                model = None if shown is None else shown[: self._points.numel]
                patience = self.members.patience(sender)
                self._do(self._peer.receive(sender, message, payload, model, patience, now), now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._do(self._peer.tick(now), now)
        for silent in self.members.to_greet(now):
            self._post(silent, Hello(reply=True))
        if now >= self._news:
            self._news = now + NEWS
            self._send([(each, Hello(reply=False), None) for each in self.members.anybody()])
        if self.wishes and self.idle and now >= self._search.again:
            self._propose(now)
        if self.gathering is not None:
            self._send([(member, question, None) for member, question in self.gathering.questions(now)])
        if self.finale is not None:
            self._send(self.finale.tick(now))
        if self.joining is not None and self.members.own.state is State.JOINING:
            greeted, asks = self.joining.tick(now)
            self.outbox += [Outgoing(address, Hello(reply=True)) for address in greeted]
            self._send([(member, fetch, None) for member, fetch in asks])

    @property
    def due(self) -> float:
        """When :meth:`tick` has something to do, unless something comes before."""
        machines = (self._peer, self.gathering, self.finale, self.joining)
        times = [due for each in machines if each is not None and (due := each.due) is not None]
        times += [self._search.again] if self.wishes and self.idle else []
        return min([*times, self._news])

    def _propose(self, now: float) -> None:
        partner = self.members.partner(self._search.tried)
        shown = self.board.lend()
        if partner is None or shown is None:
            alone = len(self.members.participants()) < 2
            # Who does not stand still asks again after its next steps.
            self._search.rest(now, goes_on=self._blocking and not alone)
            self.board.give_back()
            return
        self._search.ask(partner, now)
        model = shown[: self._points.numel]
        self._do(self._peer.propose(partner, model, self.members.patience(partner), now), now)

    def _do(self, actions: list[Action], now: float) -> None:
        for action in actions:
            match action:
                case Send():
                    self._post(action.to, action.message, action.payload)
                case Correct():
                    self.board.correct(action.change)
                    of_parameters = action.change[: self.whole.measured]
                    self.counts.sqdistance += 4 * float(of_parameters @ of_parameters)
                case Ended():
                    self._ended(action, now)
        if self.idle:
            self.board.give_back()

    def _ended(self, ended: Ended, now: float) -> None:
        self.counts.ended(ended, self._points.levels[0])
        if ended.outcome is Outcome.LATE:
            return
        own = self._search.ended(ended.partner)
        silent = ended.outcome is Outcome.UNKNOWN or (own and ended.outcome is Outcome.TIMED_OUT)
        if silent:
            self.members.failed(ended.partner, now)
        met = ended.outcome is Outcome.DONE or (ended.outcome is Outcome.WITHDRAWN and not self._blocking)
        if met and (own or self._blocking):
            self._search.fulfil()
            self._open = self._open and not self._blocking
        elif own:
            self._search.tried.add(ended.partner)

    def _whole_model(self, number: int) -> tuple[Errand, Tensor | None]:
        model = self.board.copy() if self.members.own.state in (State.HERE, State.DONE) else None
        if model is None:
            return Later(number), None
        return Model(number, self.members.own.examples), self.whole.pack(model, self.counters)

    def _patience_for_whole(self) -> float:
        """What was learnt is for a coded model; a whole one is longer, and all of them may come at once."""
        times = self.whole.bytes / self._points.bytes_for(self._points.levels[0])
        times *= max(1, len(self.members.others(State.HERE, State.DONE)))
        return min(self.members.usual_patience * times, self._longest)

    def _greet(self) -> None:
        """Tell everybody how things stand with this worker."""
        others = self.members.others(State.JOINING, State.HERE, State.DONE)
        self._send([(each, Hello(reply=False), None) for each in others])

    def _send(self, parcels: list[Parcel]) -> None:
        for to, errand, payload in parcels:
            self._post(to, errand, payload)

    def _post(self, to: int, message: Message | Errand, payload: Tensor | None = None) -> None:
        self.outbox.append(Outgoing(self.members.address(to), message, payload))
