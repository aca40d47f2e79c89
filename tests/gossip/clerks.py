"""Clerks that talk over a network of the test's making: it delays, loses and stops; time is a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.codec import Identity, Lattice
from paceline.gossip import Complete, Graph
from paceline.gossip.board import Board
from paceline.gossip.clerk import Clerk, Outgoing
from paceline.gossip.finale import Whole
from paceline.gossip.members import Members, News, State
from paceline.gossip.points import Points
from paceline.gossip.wire import Card, decode, encode

NUMBERS, MORE = 96, 4
NO_COUNTERS = torch.empty(0, dtype=torch.uint8)
CARD = Card("run", "model")


def address(number: int, life: int = 0) -> str:
    return f"tcp://10.0.0.{number}:{life + 1}"


@dataclass
class Town:
    """All clerks by address, and the letters between them: each is bytes on the way, as in real life."""

    delay: Callable[[str, Outgoing], float | None] = lambda to, letter: 0.001
    """Seconds until a letter arrives; None if it never does."""
    now: float = 0.0
    clerks: dict[str, Clerk] = field(default_factory=dict)
    letters: list[tuple[float, str, list[bytes]]] = field(default_factory=list)
    sent: list[tuple[int, Outgoing]] = field(default_factory=list)

    def settle(
        self,
        number: int,
        model: Tensor | None,
        *,
        others: int = 0,
        life: int = 0,
        codec: Lattice | Identity = Identity(),  # noqa: B008 (it is immutable)
        graph: Graph = Complete(),  # noqa: B008 (it is immutable)
        blocking: bool = False,
        contacts: tuple[str, ...] = (),
    ) -> Clerk:
        """A clerk comes to town: with a model from the beginning, or to join."""
        own = News(number, address(number, life), life, State.JOINING if model is None else State.HERE, 0)
        members = Members(own, graph)
        members.hear([News(each, address(each), 0, State.HERE, 0) for each in range(others) if each != number])
        board, whole = Board(NUMBERS, MORE), Whole(NUMBERS + MORE, 0)
        points = Points(codec, NUMBERS)
        how = {"blocking": blocking, "contacts": contacts, "now": self.now}
        clerk = Clerk(members, points, board, whole, NO_COUNTERS, **how)  # type: ignore[arg-type]
        if model is not None:
            show(clerk, model)
            clerk.begin()
        self.clerks[own.address] = clerk
        return clerk

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass in small steps; whether ``until`` has become true."""
        end = self.now + seconds
        while self.now < end:
            if until():
                return True
            for clerk in list(self.clerks.values()):
                clerk.tick(self.now)
                self._post(clerk)
            arrived = [letter for letter in self.letters if letter[0] <= self.now]
            self.letters = [letter for letter in self.letters if letter[0] > self.now]
            for _, to, frames in arrived:
                letter = decode(CARD, frames)
                assert letter is not None
                if to in self.clerks:
                    self.clerks[to].receive(letter, self.now)
                    self._post(self.clerks[to])
            self.now += 0.001
        return until()

    def kill(self, number: int) -> None:
        self.clerks = {at: clerk for at, clerk in self.clerks.items() if clerk.members.own.number != number}

    def _post(self, clerk: Clerk) -> None:
        outbox, clerk.outbox = clerk.outbox, []
        members = clerk.members
        for letter in outbox:
            self.sent.append((members.own.number, letter))
            header = encode(CARD, members.own, members.examples, members.news(), letter.message, members.lost)
            payload = [] if letter.payload is None else [letter.payload.numpy().tobytes()]
            delay = self.delay(letter.address, letter)
            if delay is not None:
                self.letters.append((self.now + delay, letter.address, [header, *payload]))


def show(clerk: Clerk, model: Tensor) -> None:
    copy = clerk.board.blank()
    copy.copy_(model)
    clerk.board.show(copy)


def shown(clerk: Clerk) -> Tensor:
    copy = clerk.board.copy()
    assert copy is not None
    return copy


def models(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(NUMBERS + MORE, generator=generator)
    return [start + 0.01 * torch.randn(NUMBERS + MORE, generator=generator) for _ in range(count)]
