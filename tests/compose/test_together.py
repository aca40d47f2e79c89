"""All methods go together: every combination that is not refused trains, saves and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compose.catalogue import CATALOGUE
from tests.compose.choices import covering, pairs, sampled
from tests.compose.jobs import EXAMPLES, try_all
from tests.compose.rules import Choice, broken, repeats
from tests.pool import Pool

PART = 25  # combinations for one call of the workers: a failure names its own, and ends the others of the part
QUICK = 3  # parts that are not slow: every method, and most of the pairs

COVERING = covering()
PAIRS = [each for each in pairs() if not broken(each)]
SAMPLED = sampled(300, refused=False)


def parts(chosen: list[Choice]) -> range:
    return range(0, len(chosen), PART)


def check(pool: Pool, tmp_path: Path, chosen: list[Choice]) -> None:
    for each, *seen in zip(chosen, *pool.run(2, try_all, chosen, tmp_path), strict=True):
        one, other = seen
        assert one.as_saved, each
        assert other.as_saved, each
        assert (one.never_stopped, one.resumed) == (other.never_stopped, other.resumed), each
        if repeats(each):
            assert one.never_stopped == one.resumed, each
        # Where workers never meet, all end with the step that they are in when they hear of the goal.
        swarms = each["sync"].startswith("Gossip")
        assert all(used >= EXAMPLES if swarms else used == EXAMPLES for used in one.examples), each


@pytest.mark.parametrize("begin", parts(COVERING)[:QUICK])
def test_combinations_run_and_resume(pool: Pool, tmp_path: Path, begin: int) -> None:
    check(pool, tmp_path, COVERING[begin : begin + PART])


@pytest.mark.slow
@pytest.mark.parametrize("begin", parts(COVERING)[QUICK:])
def test_every_pair_runs_and_resumes_within_a_combination(pool: Pool, tmp_path: Path, begin: int) -> None:
    check(pool, tmp_path, COVERING[begin : begin + PART])


@pytest.mark.slow
@pytest.mark.parametrize("begin", parts(PAIRS))
def test_every_pair_runs_and_resumes_beside_defaults(pool: Pool, tmp_path: Path, begin: int) -> None:
    check(pool, tmp_path, PAIRS[begin : begin + PART])


@pytest.mark.slow
@pytest.mark.parametrize("begin", parts(SAMPLED))
def test_sampled_combinations_run_and_resume(pool: Pool, tmp_path: Path, begin: int) -> None:
    check(pool, tmp_path, SAMPLED[begin : begin + PART])


def test_the_quick_part_has_every_method() -> None:
    quick = COVERING[: QUICK * PART]
    assert {name for each in quick for name in each.items()} == {(each.role, each.name) for each in CATALOGUE}
