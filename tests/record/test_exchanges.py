from __future__ import annotations

import math

import msgspec
import pytest

from paceline.events import Gossiped
from paceline.record.exchanges import sentence, together

from .fake import START, gossiped


def event(**changes: object) -> Gossiped:
    return msgspec.structs.replace(gossiped(), **changes)


def test_the_first_stays_as_it_is() -> None:
    assert together(None, gossiped()) == gossiped()


def test_counts_add_up_and_means_are_over_exchanges() -> None:
    first = event(
        exchanges=3, late=0, bits=8.0, distance=1.0, staleness=1.0, timeouts=2, lost=1, strangers=1, spread=0.5
    )
    later = event(time=START + 9, exchanges=1, bits=16.0, distance=3.0, staleness=5.0, timeouts=1, members=3)
    found = together(first, later)
    assert (found.time, found.exchanges, found.timeouts, found.lost, found.strangers) == (START + 9, 4, 3, 1, 1)
    assert (found.bits, found.staleness, found.members, found.spread) == (10.0, 2.0, 3, 0.5)
    assert found.distance == pytest.approx(math.sqrt((3 * 1 + 1 * 9) / 4))


def test_what_was_not_exchanged_has_no_mean_and_no_partner() -> None:
    idle = event(exchanges=0, bits=None, distance=None, staleness=None, partner=None)
    assert together(gossiped(), idle).partner == 3
    assert together(gossiped(), idle).bits == 8.0
    assert together(idle, gossiped()).distance == 0.25
    assert together(idle, idle).bits is None


def test_all_that_can_be_said() -> None:
    full = event(timeouts=4, lost=2, late=1, spread=0.125, strangers=3, unheard=5)
    assert sentence(full) == (
        "4 of 5 members  3 exchanges  1 refused  4 failed, 2 of them lost, 1 late  last with 3  0.25 apart  "
        "spread 0.125  8 bits (1 wider)  4.0 kB sent  3 strangers  2 letters unheard  by numba"
    )
    idle = event(exchanges=0, refusals=0, bits=None, distance=None, partner=None, wider=0, kernel=None, bytes_sent=0)
    assert sentence(idle) == "4 of 5 members  0 exchanges  0 bytes sent"
