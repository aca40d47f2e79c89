"""The search for a partner: who was asked since the trainer wished to average, and when all are asked again."""

from __future__ import annotations

__all__ = ["Search"]

PAUSE = 0.01  # seconds until all are asked again who were busy, where the trainer waits for one of them
LONGEST_PAUSE = 0.2  # it doubles up to there; who comes later asks at once, so that this is not waited for in general


class Search:
    """One at a time: it begins with a wish, and goes on until it is fulfilled or given up."""

    def __init__(self) -> None:
        self.goes_on = False
        """Whether there is a wish that is not fulfilled."""
        self.tried: set[int] = set()
        """Who was asked in vain."""
        self.again = 0.0
        """When somebody is asked next."""
        self._pause = PAUSE
        self._asked: tuple[int, float] | None = None

    def begin(self) -> None:
        """There is a wish."""
        self.goes_on = True
        self.again, self._pause = 0.0, PAUSE

    def give_up(self) -> None:
        """There is none any more."""
        self.goes_on = False

    def rest(self, now: float, goes_on: bool) -> None:
        """Nobody is left to be asked: all are again after a pause, if it ``goes_on``."""
        self.tried.clear()
        self.goes_on = goes_on
        self.again = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def ask(self, partner: int, now: float) -> None:
        """This one is asked."""
        self._asked = partner, now

    def seconds(self, sender: int, now: float) -> float | None:
        """How long the answer of this one has taken; None if it was not asked."""
        return now - self._asked[1] if self._asked is not None and self._asked[0] == sender else None

    def ended(self, partner: int) -> bool:
        """An exchange with this one has: gives whether it was asked for here."""
        own = self._asked is not None and self._asked[0] == partner
        if own:
            self._asked = None
        return own

    def fulfil(self) -> None:
        """The trainer's model was averaged."""
        self.goes_on = False
        self.tried.clear()
