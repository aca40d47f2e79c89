"""Coming to a swarm that trains already: its model is taken from a member, in full precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.gossip.finale import Whole
from paceline.gossip.gathering import Question
from paceline.gossip.members import Members, State
from paceline.gossip.messages import Fetch, Later, Model

__all__ = ["Joining"]

KNOCK = 0.5  # seconds between greetings
KNOCKS = 2  # before a donor is chosen: to those whose addresses were given, then to those that they have told of


class Joining:
    """Finds a donor: the most advanced of those that have a model, then the next, until one gives a sound one.

    ``contacts`` are addresses at which members of the swarm may listen; who answers tells of the others.
    """

    def __init__(
        self, members: Members, whole: Whole, contacts: Sequence[str], patience: Callable[[], float], now: float
    ) -> None:
        self._members, self._whole, self._patience = members, whole, patience
        self._contacts = [address for address in contacts if address != members.own.address]
        self._knock, self._knocks = now, 0
        self._number = 0
        self._donor: int | None = None
        self._question: Question | None = None
        self._failed: set[int] = set()
        self.model: tuple[Tensor, Tensor] | None = None
        """What was given: numbers and counters."""

    @property
    def due(self) -> float | None:
        """When :meth:`tick` has something to do."""
        if self.model is not None:
            return None
        return self._knock if self._question is None else self._question.until

    def tick(self, now: float) -> tuple[list[str], list[tuple[int, Fetch]]]:
        """Time has passed: addresses to greet, and members to ask."""
        if self.model is not None:
            return [], []
        if self._question is not None and now >= self._question.until and self._question.over:
            self._refuse(now)
        if self._question is None and not (now >= self._knock and self._knocks >= KNOCKS and self._choose(now)):
            if now < self._knock:
                return [], []
            self._knock, self._knocks = now + KNOCK, self._knocks + 1
            self._failed.clear()  # nobody is left, and who had nothing to give may have by now
            known = [self._members.address(number) for number in self._members.others(State.HERE)]
            return sorted({*self._contacts, *known}), []
        assert self._question is not None
        assert self._donor is not None
        if now < self._question.until:
            return [], []
        self._question.ask(now)
        return [], [(self._donor, Fetch(self._number, final=False))]

    def receive(self, sender: int, message: Model | Later, payload: Tensor | None) -> None:
        """An answer has come."""
        if isinstance(message, Model):
            self.take(sender, message.number, payload)
        else:
            self.later(sender, message.number)

    def later(self, sender: int, number: int) -> None:
        """The donor has nothing to give: another is asked."""
        if (sender, number) == (self._donor, self._number):
            self._refuse(None)

    def take(self, sender: int, number: int, payload: Tensor | None) -> None:
        """A model has come; one that is not finite is no model."""
        if (sender, number) != (self._donor, self._number) or payload is None or self.model is not None:
            return
        if payload.numel() != self._whole.bytes:
            return
        numbers, counters = self._whole.unpack(payload)
        if numbers[: self._whole.trained].isfinite().all():
            self.model = numbers, counters
        else:
            self._refuse(None)

    def _choose(self, now: float) -> bool:
        donors = [each for each in self._members.donors() if each not in self._failed]
        if not donors:
            return False
        self._donor, self._number = donors[0], self._number + 1
        self._question = Question(self._patience(), now)
        return True

    def _refuse(self, now: float | None) -> None:
        """The donor will not do; ``now`` if it did not answer at all."""
        assert self._donor is not None
        self._failed.add(self._donor)
        if now is not None:
            self._members.failed(self._donor, now)
        self._donor = self._question = None
