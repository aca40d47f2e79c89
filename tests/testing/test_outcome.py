"""Every check passes on what it is for, and fails on everything else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import SettingError
from paceline.testing import Ending, Outcome

KILLED = Ending(1, -9, "did 6", 3.0, 0.1, ("kill worker 1 at step 7 (computing)",), None)
LOST = Ending(0, 1, "paceline.errors.WorkerLost: rank 0 waited for rank 1", 9.0, 6.0)
WELL = Ending(0, 0, "done", 9.0, None, digest="a" * 64)


def test_detected() -> None:
    Outcome((LOST, KILLED)).check_detected(within=6, error="WorkerLost", says=r"waited for rank \d")
    Outcome((LOST, KILLED)).check_detected(within=6)


@pytest.mark.parametrize(
    ("other", "wanted", "why"),
    [
        (LOST, {"within": 5.9}, "worker 0 ended 6.0 s after the fault"),
        (LOST, {"within": 9, "error": "NonFiniteLoss"}, "worker 0 did not write NonFiniteLoss"),
        (LOST, {"within": 9, "error": "Lost"}, "worker 0 did not write Lost"),
        (LOST, {"within": 9, "says": "rank 2"}, "worker 0 wrote nothing like 'rank 2'"),
        (replace(LOST, code=0), {"within": 9}, "worker 0 ended with code 0, as if nothing had happened"),
        (replace(LOST, code=None), {"within": 9}, "worker 0 did not end by itself"),
        (replace(LOST, seconds_after_fault=None), {"within": 9}, "worker 0 ended before the fault"),
    ],
)
def test_not_detected(other: Ending, wanted: dict[str, object], why: str) -> None:
    with pytest.raises(AssertionError) as caught:
        Outcome((other, KILLED)).check_detected(**wanted)  # type: ignore[arg-type]
    assert str(caught.value).startswith(why)
    assert "--- worker 1 wrote:\ndid 6" in str(caught.value)


def test_nothing_to_detect() -> None:
    with pytest.raises(SettingError, match="there was no fault to detect"):
        Outcome((LOST,)).check_detected(within=9)
    with pytest.raises(SettingError, match="every worker has met with a fault"):
        Outcome((KILLED,)).check_detected(within=9)


def test_survivors() -> None:
    outcome = Outcome((WELL, KILLED))
    assert outcome.survivors == (0,)
    assert outcome.others == (WELL,)
    outcome.check_survivors([0])
    with pytest.raises(AssertionError, match=r"^worker 1 did not end with code 0"):
        outcome.check_survivors([0, 1])
    with pytest.raises(AssertionError, match=r"^worker 0 ended with code 0"):
        outcome.check_survivors([])


def test_same_digest() -> None:
    second = replace(WELL, worker=1)
    Outcome((WELL, second)).check_same_digest()
    Outcome((WELL, KILLED)).check_same_digest()  # one that did not end well need not tell
    Outcome((WELL,)).check_same_digest(Outcome((WELL, second)))
    with pytest.raises(AssertionError, match=r"^the digest of worker 0 is a{12}…\nthe digest of worker 1 is b{12}…"):
        Outcome((WELL, replace(second, digest="b" * 64))).check_same_digest()
    with pytest.raises(AssertionError, match="the digest of worker 1 of other outcome 1 is b"):
        Outcome((WELL,)).check_same_digest(Outcome((replace(second, digest="b" * 64),)))
    with pytest.raises(AssertionError, match=r"^worker 1 has told no digest; let it call tell_digest"):
        Outcome((WELL, replace(second, digest=None))).check_same_digest()
    with pytest.raises(AssertionError, match=r"^no worker has told a digest"):
        Outcome((LOST, KILLED)).check_same_digest()


def test_long_output_is_shortened() -> None:
    told = str(Outcome((replace(WELL, output="\n".join(f"line {number}" for number in range(100))),)))
    assert "worker 0 wrote (the last 40 of 100 lines)" in told
    assert "line 60" in told
    assert "line 59" not in told
