"""What each worker takes of its own data, when some have come to the end of theirs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.balance import Even, Fixed
from paceline.planner import Cursor, Split, advance, cut, take_local
from paceline.records import Progress


@pytest.mark.parametrize(
    ("shares", "remaining", "expected"),
    [
        ([4, 4], [9, 9], (4, 4)),
        ([40, 10, 10, 10], [20, 80, 80, 80], (20, 17, 17, 16)),  # in proportion to the shares
        ([40, 10, 10, 10], [0, 99, 99, 99], (0, 24, 23, 23)),
        ([6, 6, 4, 2], [0, 9, 9, 9], (0, 9, 6, 3)),
        ([6, 6, 4, 2], [0, 7, 99, 99], (0, 7, 7, 4)),  # what is more than a worker has, the others share again
        ([8, 2, 0, 0], [0, 99, 99, 99], (0, 10, 0, 0)),
        ([8, 2, 0, 0], [0, 5, 99, 99], (0, 5, 3, 2)),  # who has no share comes when nobody with one is left
        ([8, 0, 0], [0, 1, 99], (0, 1, 7)),
    ],
)
def test_what_a_worker_lacks_the_others_share(shares: list[int], remaining: list[int], expected: tuple[int]) -> None:
    assert take_local(shares, remaining) == expected


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=6))
def test_all_is_taken_and_nobody_takes_more_than_it_has(pairs: list[tuple[int, int]]) -> None:
    shares, remaining = [one for one, _ in pairs], [other for _, other in pairs]
    if sum(shares) > sum(remaining):
        shares = Even().split(sum(remaining), len(pairs))
    counts = take_local(shares, remaining)
    assert sum(counts) == sum(shares)
    assert all(min(share, has) <= n <= has for share, has, n in zip(shares, remaining, counts, strict=True))


def seconds_of_an_epoch(split: Split, each: list[float], length: int, batch: int) -> float:
    """With so many own examples on every worker, and so many seconds for each of them."""
    lengths = (length,) * len(each)
    cursor, seconds = Cursor(Progress(), (0,) * len(each)), 0.0
    while not cursor.progress.epoch:
        plan = cut(cursor, lengths, len(each), batch, split, None, None)
        seconds += max(n * one for n, one in zip(plan.counts, each, strict=True))
        cursor = advance(cursor, plan, lengths)
    assert cursor.progress.examples == sum(lengths)
    return seconds


def test_workers_do_not_finish_one_after_the_other() -> None:
    """A slow worker needs 400 seconds for its own 100 examples, whatever the shares; one after the other took 840."""
    each = [1.0, 4.0, 4.0, 4.0]
    # Some seconds more, since lower ranks take one example more in some steps, and others in the last.
    assert seconds_of_an_epoch(Fixed([4, 1, 1, 1]).split, each, 100, 70) <= 420
    assert 400 <= seconds_of_an_epoch(Even().split, each, 100, 70) <= 420
