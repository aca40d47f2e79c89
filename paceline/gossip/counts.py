"""What a worker counts of its exchanges, for the record."""

from __future__ import annotations

import time
from dataclasses import dataclass

from paceline.events import Gossiped
from paceline.gossip.messages import Outcome

__all__ = ["Counts"]


@dataclass
class Counts:
    """Since the run began; only the thread beside the trainer writes it, so that the trainer takes differences."""

    exchanges: int = 0
    refusals: int = 0
    timeouts: int = 0
    late: int = 0
    bits: int = 0
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

    def ended(self, outcome: Outcome, bits: int) -> None:
        """An exchange is over."""
        match outcome:
            case Outcome.DONE:
                self.exchanges += 1
                self.bits += bits
            case Outcome.REFUSED:
                self.refusals += 1
            case Outcome.TIMED_OUT | Outcome.UNKNOWN:
                self.timeouts += 1
            case Outcome.LATE:
                self.late += 1

    def since(self, before: Counts) -> Counts:
        """What has come to it."""
        return Counts(**{name: value - getattr(before, name) for name, value in vars(self).items()})

    @property
    def distance(self) -> float | None:
        """How far a model is from the mean of all, by how far partners were apart; None without an exchange.

        Two models that have nothing to do with each other are apart by the root of two times as far as each is from
        the mean.
        """
        done = self.exchanges + self.late
        return (self.sqdistance / done / 2) ** 0.5 if done else None

    def event(self, step: int, members: int, examples: int, spread: float | None) -> Gossiped:
        """For the record; ``spread`` is what a consensus has measured, if there was one."""
        return Gossiped(
            time=time.time(),
            step=step,
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
            examples=examples,
        )
