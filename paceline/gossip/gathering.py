"""The average of whole models that are asked for one by one: who does not answer is left out, and nobody is stopped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.gossip.messages import Await, Fetch, Later, Model

if TYPE_CHECKING:
    from paceline.gossip.finale import Whole

__all__ = ["ALIVE", "POLL", "Gathering", "Question"]

TRIES = 2  # questions in vain until a member is left out
ALIVE = 1.0  # seconds in which one that lives should be able to say so, whatever it does
POLL = 0.05  # seconds until one is asked again that had nothing to give yet


@dataclass
class Question:
    """Something that one member is asked until it answers, each time with twice the patience of the last."""

    patience: float
    until: float
    tries: int = TRIES

    def __post_init__(self) -> None:
        self._first = self.patience

    @property
    def over(self) -> bool:
        """Whether it was asked in vain often enough."""
        return self.tries == 0

    def ask(self, now: float) -> None:
        """It is asked (again)."""
        self.tries -= 1
        self.until = now + self.patience
        self.patience *= 2

    def later(self, now: float) -> None:
        """There was an answer: to ask again. What is lost from now on is asked for as soon as at the beginning."""
        self.tries, self.patience = TRIES, self._first
        self.until = now + POLL


class Gathering:
    """Puts models together, each with a weight; the own one is there from the beginning.

    A member is asked first whether it lives, which a dead one does not keep anybody waiting for long with, then for its
    model, for which it has as long as ``patience``. ``number`` is that of the questions, ``final`` what is asked for.
    Differences to the own model are added up in double precision, so that the distances of the models from their mean,
    which are small, do not drown in rounding. ``extent`` says how many numbers, the first ones, must be finite, or a
    model does not count, and between how many of these distances are measured; what else belongs to a model may be
    anything (masks often are infinite).
    """

    def __init__(
        self,
        number: int,
        member: int,
        own: Tensor,
        weight: int,
        *,
        final: bool,
        patience: float,
        extent: tuple[int, int],
    ) -> None:
        self.number = number
        self._final, self._patience = final, patience
        self._trained, self._measured = extent
        sound = self._is_sound(own)
        self._own, self._shown = own if sound else torch.zeros_like(own), own
        self._weight = weight if sound else 0
        self._sum = torch.zeros(own.numel(), dtype=torch.float64)
        self._squares = 0.0
        self._asked: dict[int, Question] = {}
        self._seen: set[int] = set()
        self._alive: set[int] = set()
        self.members = [member] if sound else []
        """Whose models are in it."""

    def include(self, member: int, now: float, tries: int = TRIES) -> None:
        """Somebody is to be asked, unless it was before."""
        if member not in self._seen:
            self._seen.add(member)
            self._asked[member] = Question(ALIVE, now, tries)

    def questions(self, now: float) -> list[tuple[int, Await | Fetch]]:
        """What to ask whom now."""
        due = [member for member, question in self._asked.items() if now >= question.until]
        for member in [each for each in due if self._asked[each].over]:
            del self._asked[member]
            due.remove(member)
        for member in due:
            self._asked[member].ask(now)
        fetch, wait = Fetch(self.number, self._final), Await(self.number)
        return [(member, fetch if member in self._alive else wait) for member in due]

    def receive(self, member: int, message: Model | Later, payload: Tensor | None, whole: Whole, now: float) -> None:
        """An answer has come, maybe to an earlier question; a payload that cannot be a ``whole`` model is nothing."""
        if message.number != self.number:
            return
        if isinstance(message, Later):
            self.later(member, now, message.away)
        elif payload is not None and payload.numel() == whole.bytes:
            self.take(member, whole.unpack(payload)[0], message.weight)

    def take(self, member: int, model: Tensor, weight: int) -> None:
        """One has come; if it is not finite it does not count, or all would be spoilt."""
        if member not in self._asked:
            return
        if self._is_sound(model):
            away = torch.where(model == self._own, 0.0, model.double() - self._own)  # infinities that are the same
            self._sum.add_(away, alpha=weight)
            self._squares += weight * float(away[: self._measured] @ away[: self._measured])
            self._weight += weight
            self.members = sorted([*self.members, member])
        del self._asked[member]  # last: another thread looks whether all have come

    def _is_sound(self, model: Tensor) -> bool:
        return bool(model[: self._trained].isfinite().all())

    def later(self, member: int, now: float, away: bool = False) -> None:
        """One lives, or has no model to give yet; or it is ``away``, and will not have one.

        Only a final model is waited for.
        """
        if member not in self._asked:
            return
        if away or (member in self._alive and not self._final):
            del self._asked[member]
        elif member in self._alive:
            self._asked[member].later(now)
        else:
            self._alive.add(member)
            self._asked[member] = Question(self._patience, now)

    def forget(self, members: Iterable[int]) -> None:
        """These have left."""
        for member in members:
            self._asked.pop(member, None)

    @property
    def due(self) -> float | None:
        """When there is somebody to be asked."""
        return min((question.until for question in self._asked.values()), default=None)

    @property
    def done(self) -> bool:
        """Whether all have answered, or did not in time."""
        return not self._asked

    @property
    def missing(self) -> list[int]:
        """Who has not answered yet."""
        return sorted(self._asked)

    def mean(self) -> Tensor:
        """The weighted average; models that nobody has trained yet are all the same. Of no sound model: the own one."""
        if not self.members:
            return self._shown.clone()
        return self._own.double().add_(self._sum, alpha=1 / max(self._weight, 1)).float()

    def distance(self) -> float:
        """How far the models are from it: the root of the weighted mean of the squares."""
        weight, total = max(self._weight, 1), self._sum[: self._measured]
        return math.sqrt(max(0.0, self._squares / weight - float(total @ total) / weight**2))
