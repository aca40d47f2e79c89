"""Which failure is the cause, and what is said about the others."""

from __future__ import annotations

from paceline.cli.failures import Failure, cause, explain, shell_code


def lost(rank: int, time: float) -> Failure:
    return Failure(rank, 1, time, "WorkerLost", f"WorkerLost: rank {rank} waited for rank 2")


def test_the_cause_is_the_earliest_that_follows_from_no_other() -> None:
    error = Failure(2, 1, 5.0, "ValueError", "ValueError: bad")
    late = Failure(3, 1, 6.0, "KeyError", "KeyError: late")
    all = [lost(0, 4.0), late, error, lost(1, 4.5)]
    assert cause(all) is error
    assert explain(all) == [
        "rank 2 failed (exit code 1): ValueError: bad",
        "rank 3 failed (exit code 1): KeyError: late",
        "ranks 0, 1 stopped because of that: WorkerLost: rank 0 waited for rank 2",
    ]


def test_a_killed_worker_is_the_cause_though_the_others_noticed_first() -> None:
    killed = Failure(2, -9, 7.0)
    assert cause([lost(0, 4.0), killed]) is killed


def test_a_frozen_worker_that_the_launcher_killed_is_not_the_cause() -> None:
    frozen = Failure(2, -9, 3.0, ended_by_launcher=True)
    assert explain([frozen, lost(1, 4.5), lost(0, 4.0)]) == [
        "ranks 0, 1 failed (exit code 1): WorkerLost: rank 0 waited for rank 2",
        "rank 2 still ran, and had to be ended",
    ]


def test_the_same_error_of_all_is_told_once() -> None:
    same = [Failure(rank, 1, float(rank), "KeyError", "KeyError: x") for rank in (2, 0, 1)]
    assert explain(same) == ["ranks 0, 1, 2 failed (exit code 1): KeyError: x"]


def test_long_errors_are_cut() -> None:
    (line,) = explain([Failure(0, 1, 0.0, "KeyError", "KeyError: " + "x" * 10_000)])
    assert len(line) < 600


def test_words_for_signals() -> None:
    assert explain([Failure(0, -11, 0.0)]) == ["rank 0 ended by SIGSEGV"]
    assert explain([Failure(0, 130, 0.0)]) == ["rank 0 stopped by SIGINT"]
    assert explain([Failure(0, -250, 0.0)]) == ["rank 0 ended by signal 250"]


def test_codes_as_in_a_shell() -> None:
    assert [shell_code(code) for code in (0, 3, -9)] == [0, 3, 137]
