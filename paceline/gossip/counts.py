"""What a worker counts of its exchanges, for the record."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

from paceline.events import Gossiped
from paceline.gossip.messages import Ended, Outcome

__all__ = ["Counts"]


@dataclass
class Counts:
    """Since the run began; only the thread beside the trainer writes it, so that the trainer takes differences."""

    exchanges: int = 0
    refusals: int = 0
    timeouts: int = 0
    lost: int = 0
    """Of these, such as the partner may have completed."""
    late: int = 0
    bits: int = 0
    wider: int = 0
    """Exchanges that took more bits than the codec's."""
    sqdistance: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    unheard: int = 0
    """Letters that were not of this run, or not letters at all."""
    strangers: int = 0
    """Connections without the run's key."""
    age: int = 0
    """Steps between the models that were shown and those that corrections were added to."""
    taken: int = 0
    """Corrections that were added."""
    partner: int | None = None
    """Of the last exchange."""

    def ended(self, ended: Ended, fewest: int) -> None:
        """An exchange is over; ``fewest`` are the bits that it takes if partners are near."""
        match ended.outcome:
            case Outcome.DONE:
                self.partner = ended.partner  # first: the trainer may look in between
                self.exchanges += 1
                self.bits += ended.bits
                self.wider += ended.bits > fewest
            case Outcome.REFUSED:
                self.refusals += 1
            case Outcome.TIMED_OUT | Outcome.UNKNOWN:
                self.timeouts += 1
                self.lost += ended.outcome is Outcome.UNKNOWN
            case Outcome.LATE:
                self.partner = ended.partner
                self.late += 1

    def since(self, before: Counts) -> Counts:
        """What has come to it."""
        summed = [field.name for field in fields(self) if field.name != "partner"]
        more = {name: getattr(self, name) - getattr(before, name) for name in summed}
        found = Counts(**more)
        found.partner = self.partner if found.exchanges or found.late else None
        return found

    @property
    def distance(self) -> float | None:
        """How far a model is from the mean of all, by how far partners were apart; None without an exchange.

        Two models that have nothing to do with each other are apart by the root of two times as far as each is from
        the mean.
        """
        done = self.exchanges + self.late
        return (self.sqdistance / done / 2) ** 0.5 if done else None

    def event(
        self,
        step: int,
        worker: int,
        *,
        members: int,
        known: int,
        examples: int,
        spread: float | None,
        kernel: str | None,
    ) -> Gossiped:
        """For the record; ``spread`` is what a consensus has measured, if there was one."""
        return Gossiped(
            time=time.time(),
            step=step,
            worker=worker,
            exchanges=self.exchanges,
            refusals=self.refusals,
            timeouts=self.timeouts,
            late=self.late,
            bits=self.bits / self.exchanges if self.exchanges else None,
            staleness=self.age / self.taken if self.taken else None,
            distance=self.distance,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            unheard=self.unheard + self.strangers,
            spread=spread,
            members=members,
            known=known,
            examples=examples,
            partner=self.partner,
            lost=self.lost,
            wider=self.wider,
            strangers=self.strangers,
            kernel=kernel,
        )
