"""The end of the training: one average of all models, the same on every worker that is there to get it.

All that have come to the end look to the lowest number that they know to be alive. It asks everybody for the final
model, leaves out who does not answer, and gives everybody the average. If it dies, the next does that; whoever has the
average already gives it to who asks, so that there are not two. Only if the network falls apart just then does each
part get an average of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.gossip.gathering import ALIVE, POLL, Gathering, Question
from paceline.gossip.members import Members, State
from paceline.gossip.messages import Agreed, Await, Errand, Fetch, Got, Later, Model

__all__ = ["Finale", "Parcel", "Whole"]

SILENT_TRIES = 1  # for those that have not answered lately: they may be back
FIRST = 1 << 32  # number of a question: answers to earlier ones, of a consensus, are not taken for final models

Parcel = tuple[int, Errand, Tensor | None]
"""To whom, what, and a payload."""


class Whole:
    """A model with all that belongs to it, as bytes: numbers, of which some are averaged in exchanges, and counters."""

    def __init__(self, numel: int, counters: int, trained: int | None = None, measured: int | None = None) -> None:
        self.trained = numel if trained is None else trained
        """How many of the numbers are averaged in exchanges: the first ones."""
        self.measured = self.trained if measured is None else measured
        """How many of these are parameters, the first ones again: distances are measured between these."""
        self.bytes = 4 * numel + counters
        self._split = [4 * numel, counters]

    def pack(self, numbers: Tensor, counters: Tensor) -> Tensor:
        """As a payload, a copy."""
        return torch.cat([numbers.view(torch.uint8), counters])

    def unpack(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers, and the counters."""
        numbers, counters = torch.split(payload, self._split)
        return numbers.view(torch.float32), counters


class Finale:
    """What one worker does to get the average of all. ``own`` is its final model; ``patience`` is for such a model."""

    def __init__(self, members: Members, whole: Whole, own: Tensor, counters: Tensor, patience: float) -> None:
        self._members, self._whole, self._patience = members, whole, patience
        self._numbers, self._counters = own, counters
        self._lost: set[int] = set()
        self._gathering: Gathering | None = None
        self._lead = -1
        self._await: Question | None = None
        self._owed: dict[int, Question] = {}
        self._number = FIRST
        self.agreed: Tensor | None = None
        """The average, as a payload."""
        self.of: list[int] = []
        """Whose models are in it."""

    @property
    def finished(self) -> bool:
        """Whether this worker has the average, and nobody waits for it to pass it on."""
        return self.agreed is not None and not self._owed

    @property
    def due(self) -> float | None:
        """When :meth:`tick` has something to do."""
        times = [question.until for question in self._owed.values()]
        if self.agreed is None:
            times += [self._await.until] if self._await else []
            times += [due for due in [self._gathering.due if self._gathering else None] if due is not None]
        return min(times, default=None)

    @property
    def waits_for(self) -> str:
        """For an error: who is missing."""
        if self._gathering is not None:
            return f"the final models of members {self._gathering.missing}"
        return f"the average of all models from member {self._lead}"

    def tick(self, now: float) -> list[Parcel]:
        """Time has passed."""
        if self.agreed is not None:
            return self._remind(now)
        self._elect(now)
        if self._gathering is not None:
            return self._gather(self._gathering, now)
        assert self._await is not None
        if now < self._await.until:
            return []
        if self._await.over:
            self._lost.add(self._lead)
            return self.tick(now)
        self._await.ask(now)
        return [(self._lead, Await(self._number), None)]

    def receive(self, sender: int, errand: Errand, payload: Tensor | None, now: float) -> list[Parcel]:
        """Something has come that belongs to the end."""
        self._lost.discard(sender)
        fits = payload is not None and payload.numel() == self._whole.bytes
        match errand:
            case Agreed():
                if fits and self.agreed is None:
                    self.agreed, self.of, self._gathering = payload, errand.members, None
                return [(sender, Got(), None)] if fits else []
            case Got():
                self._owed.pop(sender, None)
            case Fetch() | Await() if self.agreed is not None:
                return [(sender, Agreed(self.of), self.agreed)]
            case Fetch():
                own = self._whole.pack(self._numbers, self._counters)
                return [(sender, Model(errand.number, self._members.own.examples), own)]
            case Await():
                return [(sender, Later(errand.number), None)]
            case Later() | Model() if self._gathering is not None:
                self._gathering.receive(sender, errand, payload, self._whole, now)
            case Later() if self._await is not None and errand.number == self._number:
                self._await.later(now)
        return []

    def _elect(self, now: float) -> None:
        """Who puts the average together; a change begins anew."""
        others = [n for n in self._members.others(State.HERE, State.DONE) if n not in self._lost]
        silent = set(self._members.silent())
        lead = min([self._members.own.number, *(n for n in others if n not in silent)])
        if lead != self._lead:
            self._lead, self._number = lead, self._number + 1
            own = self._members.own
            self._gathering, self._await = None, Question(ALIVE, now + POLL)
            if lead == own.number:
                how = self._number, own.number, self._numbers, own.examples
                extent = self._whole.trained, self._whole.measured
                self._gathering = Gathering(*how, final=True, patience=self._patience, extent=extent)
                self._await = None
        if self._gathering is not None:
            for other in others:
                tries = {"tries": SILENT_TRIES} if other in silent else {}
                self._gathering.include(other, now, **tries)
            self._gathering.forget(self._members.others(State.LEFT))

    def _gather(self, gathering: Gathering, now: float) -> list[Parcel]:
        parcels: list[Parcel] = [(member, question, None) for member, question in gathering.questions(now)]
        if not gathering.done:
            return parcels
        others = [n for n in gathering.members if n != self._members.own.number]
        self._owed = {n: Question(self._patience, now) for n in others}
        # Last: another thread looks whether there is an average that is owed to nobody.
        self._gathering, self.of = None, gathering.members
        self.agreed = self._whole.pack(gathering.mean(), self._counters)
        return [*parcels, *self._remind(now)]

    def _remind(self, now: float) -> list[Parcel]:
        """Give the average to those that have not said yet that they have it."""
        due = [n for n, question in self._owed.items() if now >= question.until]
        gone = {n for n in due if self._owed[n].over} | set(self._members.others(State.LEFT))
        self._owed = {n: question for n, question in self._owed.items() if n not in gone}
        due = [n for n in due if n in self._owed]
        for n in due:
            self._owed[n].ask(now)
        return [(n, Agreed(self.of), self.agreed) for n in due]
