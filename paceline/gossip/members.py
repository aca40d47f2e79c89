"""Who takes part, as one worker knows it: from each other, without a list that anybody keeps for all."""

from __future__ import annotations

import enum
import random
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from paceline.errors import SettingError
from paceline.gossip.graph import Graph

__all__ = ["Members", "News", "Patience", "State"]

FAILURES = 2  # exchanges that a member leaves unanswered before it is taken for silent
RETRY = 1.0  # seconds until a silent member is greeted again; twice as long every time
LONGEST_RETRY = 30.0
ANSWERS = 5  # that patience is learnt from at least
TOLD = 8  # members that a message tells of


class State(enum.StrEnum):
    """How far a member is."""

    JOINING = "joining"
    """It has no model of the swarm yet: it must not be averaged with, nor asked for its model."""
    HERE = "here"
    DONE = "done"
    """It has come to the end of the training, or was told to stop, and so have all who hear of it."""
    LEFT = "left"
    """It has said goodbye."""


class News(msgspec.Struct, frozen=True):
    """What is said of a member."""

    number: Annotated[int, Meta(ge=0, lt=1 << 31)]
    address: Annotated[str, Meta(pattern=r"^tcp://[A-Za-z0-9_.-]+:[0-9]{1,5}\Z", max_length=300)]
    """Where it listens."""
    life: Annotated[int, Meta(ge=0, lt=1 << 38)]
    """Larger for every time that it was started."""
    state: State
    examples: Annotated[int, Meta(ge=0, lt=1 << 56)]
    """That it has used so far, in all its lives."""

    def newer(self, other: News) -> News:
        """What is true of the two: of the later life, the later state. Examples only grow."""
        later = max(self, other, key=lambda news: (news.life, list(State).index(news.state), news.examples))
        return msgspec.structs.replace(later, examples=max(self.examples, other.examples))


@dataclass
class Patience:
    """How long to wait for an answer, by how long answers took: the median, and several times the spread around it.

    After every answer that did not come twice as long, until one does: what takes longer than ever must not fail for
    ever.
    """

    first: float = 5.0
    """Seconds, before anything is known."""
    least: float = 0.2
    most: float = 60.0
    _taken: deque[float] = field(default_factory=lambda: deque(maxlen=64), repr=False)
    _failures: int = field(default=0, repr=False)

    def took(self, seconds: float) -> None:
        """An answer came after so long."""
        self._taken.append(seconds)
        self._failures = 0

    def failed(self) -> None:
        """None came."""
        self._failures = min(self._failures + 1, 16)

    @property
    def seconds(self) -> float:
        """How long to wait for the next."""
        usual = self.first
        if self.learnt:
            taken = list(self._taken)  # other threads ask, too
            middle = statistics.median(taken)
            spread = statistics.median(abs(each - middle) for each in taken)
            usual = max(3 * middle + 10 * spread, self.least)
        return self.longer(usual)

    @property
    def learnt(self) -> bool:
        """Whether there were enough answers to judge by."""
        return len(self._taken) >= ANSWERS

    def longer(self, seconds: float) -> float:
        """So long, or longer if answers did not come lately."""
        return min(seconds * 2.0**self._failures, self.most)


@dataclass
class _Contact:
    """What this worker has seen of another itself."""

    failures: int = 0
    again: float = 0.0
    """When a silent one is greeted again."""
    patience: Patience = field(default_factory=Patience)


class Members:
    """All that a worker knows of the others, and with whom it averages next."""

    def __init__(self, own: News, graph: Graph, seed: int = 0) -> None:
        self.own = own
        self._graph = graph
        self._known: dict[int, News] = {own.number: own}
        self._contacts: dict[int, _Contact] = {}
        self.before = own.examples
        """Examples that this worker has used in earlier lives."""
        self._told = 0
        self.lost = 0
        """Examples that were used before the run was resumed, and that no member counts as its own."""
        self._patience = Patience()
        self._chance = random.Random(repr((seed, own.number, own.life)))

    def tell(self, state: State | None = None, examples: int | None = None) -> None:
        """Something has changed with this worker itself; ``examples`` are those of this life."""
        self.own = msgspec.structs.replace(
            self.own,
            state=self.own.state if state is None else state,
            examples=self.own.examples if examples is None else self.before + examples,
        )
        self._known[self.own.number] = self.own

    def hear(self, news: Iterable[News]) -> None:
        """Something was said of members; of this one itself it only counts what it did in an earlier life."""
        for each in news:
            if each.number == self.own.number:
                self._hear_of_own(each)
                continue
            before = self._known.get(each.number)
            self._known[each.number] = each if before is None else before.newer(each)
            if before is not None and each.life > before.life:  # a new life: what it failed to do before is forgotten
                self._contacts.pop(each.number, None)

    def _hear_of_own(self, news: News) -> None:
        own = self.own
        if news.life > own.life or (news.life == own.life and news.address != own.address):
            raise SettingError(
                f"another worker has begun as member {own.number}, at {news.address}; this one is not needed any more, "
                "or both were started with the same number"
            )
        if news.life < own.life and news.examples > self.before:
            before, self.before = self.before, news.examples
            self.tell(examples=own.examples - before)

    def resume(self, examples: int, of_all: int, lost: int = 0) -> None:
        """By its checkpoint this worker has used so many examples in earlier lives, and all together so many.

        Of these, ``lost`` are in nobody's own count.
        """
        this_life = self.own.examples - self.before
        self.before = max(self.before, examples)
        self.tell(examples=this_life)
        self.hear_of_all(of_all, lost)

    def hear_of_all(self, examples: int, lost: int = 0) -> None:
        """Somebody knows of so many examples that all have used: it may have heard of members that this one has not.

        What was ``lost`` is the same for all; who has come later hears it from the others.
        """
        self._told, self.lost = max(self._told, examples), max(self.lost, lost)

    def answered(self, number: int, seconds: float | None = None) -> None:
        """A member has been heard, after so long if it was waited for."""
        contact = self._contact(number)
        contact.failures = 0
        if seconds is not None:
            contact.patience.took(seconds)
            self._patience.took(seconds)

    def failed(self, number: int, now: float) -> None:
        """A member was waited for in vain."""
        self._contact(number).patience.failed()
        self._missed(number, now)

    def _missed(self, number: int, now: float) -> None:
        """It was waited for, or greeted, in vain. Nobody waits for who is greeted: that says nothing of patience."""
        contact = self._contact(number)
        contact.failures += 1
        if contact.failures >= FAILURES:
            contact.again = now + min(RETRY * 2.0 ** min(contact.failures - FAILURES, 10), LONGEST_RETRY)

    def patience(self, number: int) -> float:
        """How long to wait for a member: by its own answers, or by those of all as long as it has given few."""
        own = self._contact(number).patience
        return own.seconds if own.learnt else own.longer(self._patience.seconds)

    @property
    def usual_patience(self) -> float:
        """How long to wait for a member that nothing is held against."""
        return self._patience.seconds

    def to_greet(self, now: float) -> list[int]:
        """The silent members whose turn it is: they are not averaged with until they have said something.

        A greeting is short, so that nobody waits for it; an exchange with one that is dead would keep others away.
        """
        due = [n for n in self.silent() if self._known[n].state is not State.LEFT and self._contact(n).again <= now]
        for number in due:
            self._missed(number, now)
        return due

    def address(self, number: int) -> str:
        """Where a member listens."""
        return self._known[number].address

    def life(self, number: int) -> int:
        """Which life a member is in; -1 if it is not known."""
        return self._known[number].life if number in self._known else -1

    def participants(self) -> list[int]:
        """Those that average now, this worker included: who has a model, has not left, and is not silent."""
        here = [number for number, news in self._known.items() if news.state is State.HERE]
        return sorted(number for number in here if not self._is_silent(number))

    @property
    def known(self) -> int:
        """How many it has ever heard of, itself included."""
        return len(self._known)

    def silent(self) -> list[int]:
        """Those that did not answer lately."""
        return sorted(number for number in self._known if self._is_silent(number))

    def partner(self, but: Iterable[int] = ()) -> int | None:
        """One of the neighbours at random; None if there is nobody, or only those in ``but``, who were busy."""
        there = self.participants()
        if self.own.number not in there or len(there) < 2:
            return None
        neighbours = self._graph.neighbours(there)
        if self.own.number not in neighbours:
            raise SettingError(f"member {self.own.number} is not in {self._graph!r}; add an edge for it")
        around = [each for each in neighbours[self.own.number] if each not in set(but)]
        return self._chance.choice(around) if around else None

    def anybody(self) -> list[int]:
        """One of those that average, at random, whether it is a neighbour or not; empty if there is nobody else."""
        others = [number for number in self.participants() if number != self.own.number]
        return self._chance.sample(others, min(1, len(others)))

    def donors(self) -> list[int]:
        """Who could give its model to one that joins: those that have one, the most advanced first."""
        there = [number for number in self.participants() if number != self.own.number]
        return sorted(there, key=lambda number: -self._known[number].examples)

    @property
    def examples(self) -> int:
        """That all members have used so far, as far as it was heard."""
        return max(self._told, self.lost + sum(news.examples for news in self._known.values()))

    @property
    def elsewhere(self) -> int:
        """Of these, all but those that this worker has used in this life."""
        return self.examples - (self.own.examples - self.before)

    @property
    def addresses(self) -> set[str]:
        """Where members listen that have not left."""
        return {news.address for news in list(self._known.values()) if news.state is not State.LEFT}

    def others(self, *states: State) -> list[int]:
        """The other members that were last heard to be in one of these states."""
        return sorted(n for n, news in list(self._known.items()) if n != self.own.number and news.state in states)

    def news(self) -> list[News]:
        """What to say in a message: of this worker, and of some others, drawn at random."""
        others = [news for number, news in self._known.items() if number != self.own.number]
        return [self.own, *self._chance.sample(others, min(TOLD, len(others)))]

    def _is_silent(self, number: int) -> bool:
        contact = self._contacts.get(number)
        return contact is not None and contact.failures >= FAILURES

    def _contact(self, number: int) -> _Contact:
        return self._contacts.setdefault(number, _Contact())
