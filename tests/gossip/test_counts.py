"""What is counted of exchanges that end in every way."""

from __future__ import annotations

from dataclasses import replace

from paceline.gossip.counts import Counts
from paceline.gossip.messages import Ended, Outcome


def test_every_end_is_counted_as_what_it_is() -> None:
    counts = Counts()
    ends = [
        Ended(1, Outcome.DONE, 8),
        Ended(2, Outcome.DONE, 32),
        Ended(3, Outcome.REFUSED),
        Ended(3, Outcome.TIMED_OUT),
        Ended(4, Outcome.UNKNOWN),
        Ended(3, Outcome.WITHDRAWN),
    ]
    for end in ends:
        counts.ended(end, fewest=8)
    assert counts == Counts(exchanges=2, bits=40, wider=1, refusals=1, timeouts=2, lost=1, partner=2)
    counts.ended(Ended(4, Outcome.LATE, 8), fewest=8)
    assert (counts.late, counts.partner) == (1, 4)


def test_the_last_partner_is_told_once() -> None:
    counts = Counts()
    counts.ended(Ended(1, Outcome.DONE, 8), fewest=8)
    before = replace(counts)
    counts.ended(Ended(2, Outcome.REFUSED), fewest=8)
    assert counts.since(Counts()).partner == 1
    assert counts.since(before) == Counts(refusals=1)
