"""Whose fault it is when others keep this worker waiting: the dead are told from the late, and all hear the same."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.errors import WorkerLost
from paceline.watch import SILENT, Watch

__all__ = ["Blame", "name_ranks"]


class Blame:
    """What one worker finds out in its waits, by what its watch hears of the others.

    A wait is for something, ``what``, ``since`` a time of ``time.monotonic``, for as many seconds as ``deadline`` says.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._moved: float | None = None
        self._places: dict[int, tuple[int, str]] = {}

    @contextmanager
    def while_they_move(self) -> Iterator[None]:
        """While inside, the deadline is for the time in which no other worker moves on."""
        self._moved = time.monotonic()
        try:
            yield
        finally:
            self._moved = None

    def look_around(self, what: str, since: float, deadline: float, missing: tuple[int, ...] = ()) -> None:
        """Called now and then while waiting: raises if there is no point in waiting longer.

        ``missing`` are those that are waited for, if that is known.
        """
        waited = time.monotonic() - since
        if waited > min(1.0, deadline):
            self._watch.attend(True)
            self._blame_who_left()
        limit = deadline
        if self._moved is not None:
            if not self._watch.silent():
                limit *= 2  # whoever the others wait for, they know better
            if (places := self._watch.places()) != self._places:
                self._places, self._moved = places, time.monotonic()
            waited = time.monotonic() - max(since, self._moved)
        # Who looks around only shortly before the deadline cannot tell the dead from the late yet.
        patience = 2 * SILENT if self._watch.undecided() else 0.0
        if self._watch.trouble is None and waited > limit + patience:
            silent = tuple(self._watch.silent())
            ranks = silent or missing or self._watch.elsewhere()
            alive = "is alive, but late" if len(ranks) == 1 else "are alive, but late"
            happened = "gave no sign of life" if silent else alive
            self._watch.post(ranks, self._describe(ranks, happened, f"the deadline of {limit:g} s passed"))
        if self._watch.trouble is not None:
            raise self._error(what, since)

    def for_broken(self, what: str, since: float, deadline: float, error: BaseException) -> WorkerLost:
        """For a connection that has broken while waiting; takes a few heartbeats at most."""
        # Inside of DDP's backward pass torch's own limit is the only one; when it closes a worker's connections, the
        # next worker sees them break.
        late = "imed out" in str(error) or time.monotonic() - since > deadline
        self._watch.attend(True)
        end = time.monotonic() + 2 * SILENT
        while self._watch.trouble is None and not self._watch.silent() and time.monotonic() < end:
            self._blame_who_left()
            time.sleep(0.05)
        if self._watch.trouble is None:
            ranks = tuple(self._watch.silent())
            happened = "gave no sign of life" if late else "ended or lost its connection"
            self._watch.post(ranks, self._describe(ranks, happened, _reason(error)))
        return self._error(what, since)

    def _blame_who_left(self) -> None:
        for rank, why in self._watch.leavers().items():
            if self._watch.trouble is None:
                self._watch.post((rank,), why)

    def _describe(self, ranks: tuple[int, ...], happened: str, cause: str) -> str:
        watch = self._watch
        if not ranks:
            words = "; ".join(f"rank {r}: {watch.last_words(r)}" for r in range(watch.size) if r != watch.rank)
            return f"{cause}; all workers are alive ({words})"
        words = "; ".join(f"rank {rank}: {watch.last_words(rank)}" for rank in ranks)
        return f"{happened} ({words}; {cause})"

    def _error(self, what: str, since: float) -> WorkerLost:
        watch, trouble = self._watch, self._watch.trouble
        seconds = time.monotonic() - since
        ranks, text = (trouble.ranks, trouble.text) if trouble else ((), "the notice of trouble could not be read")
        whom = name_ranks(ranks) if ranks else "a worker that could not be named"
        found = (
            f"; found by rank {trouble.found_by}" if trouble and trouble.found_by not in (*ranks, watch.rank) else ""
        )
        message = f"rank {watch.rank}, in step {watch.step}, waited {seconds:.1f} s for {what}: {whom} {text}{found}"
        return WorkerLost(message, ranks=ranks, waited_for=what, seconds=seconds)


def name_ranks(ranks: Sequence[int]) -> str:
    """Some workers, for a message."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _reason(error: BaseException) -> str:
    """The first sentence of gloo's message, without the place in its source."""
    return re.sub(r"^.*\.cc:\d+\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
