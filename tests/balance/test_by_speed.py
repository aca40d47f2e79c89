"""Shares in a closed loop with workers whose times are known."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import paceline as pl
from paceline.balance import BySpeed, Even, Fixed
from paceline.balance.solver import Speed, finish, longest_wait, makespan
from paceline.balance.speed import SpeedModel, Typical, typical, worth_of
from paceline.records import Note, Plan, Round


def a_round(step: int, shares: Sequence[int], seconds: Sequence[float], steps: int = 1) -> Round:
    notes = tuple(
        Note(examples=steps * share, weight=steps * share, busy_seconds=took, steps=steps)
        for share, took in zip(shares, seconds, strict=True)
    )
    return Round(Plan(step, 0, tuple(0 for _ in shares), tuple(shares), 10**6), notes)


def in_epoch(epoch: int, one: Round) -> Round:
    return msgspec.structs.replace(one, plan=msgspec.structs.replace(one.plan, epoch=epoch))


def simulate(
    policy: BySpeed,
    workers: Callable[[int], Sequence[Speed]],
    steps: int,
    batch: int = 512,
    noise: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """The shares of every step; ``workers`` tells the true speeds at a step."""
    drawn = random.Random(seed)
    found = []
    for step in range(steps):
        true = workers(step)
        shares = policy.split(batch, len(true))
        found.append(shares)
        seconds = [finish(one, share) * drawn.lognormvariate(0, noise) for one, share in zip(true, shares, strict=True)]
        policy.observe(a_round(step, shares, seconds))
    return found


def idle(speeds: Sequence[Speed], shares: Sequence[int]) -> float:
    """The part of the workers' time that is waiting."""
    whole = makespan(speeds, shares)
    return 1 - sum(finish(one, share) for one, share in zip(speeds, shares, strict=True)) / (whole * len(speeds))


UNEVEN = [Speed(0.0, 1.0), Speed(0.0, 2.0), Speed(0.0, 4.0)]


def test_proportional_workers_are_balanced_with_the_first_plan() -> None:
    shares = simulate(BySpeed(every=5, change=10.0), lambda step: UNEVEN, 7)
    assert shares[4] == Even().split(512, 3)
    assert idle(UNEVEN, shares[4]) > 0.4
    assert shares[5] == [293, 146, 73]
    assert idle(UNEVEN, shares[5]) < 0.01


@pytest.mark.parametrize("fixed", [0.1, 0.3, 0.6])
def test_fixed_time_is_learnt_with_the_second_plan_and_the_third(fixed: float) -> None:
    whole = 512 / 3
    speeds = [Speed(fixed * whole * c, (1 - fixed) * c) for c in (1.0, 1.5, 2.0)]
    shares = simulate(BySpeed(every=5, change=10.0, dead_band=0.0), lambda step: speeds, 30)
    before, after, later = (idle(speeds, shares[step]) for step in (5, 10, 15))
    assert after < before / 2  # the doubt whether others have disturbed it costs a little
    assert later < 0.01
    assert idle(speeds, shares[-1]) < 0.01


def test_a_share_changes_by_no_more_than_it_may() -> None:
    shares = simulate(BySpeed(every=1, change=1.25, dead_band=0.0), lambda step: UNEVEN, 12)
    for before, after in itertools.pairwise(shares):
        for old, new in zip(before, after, strict=True):
            assert old / 1.25 <= new <= old * 1.25
    assert idle(UNEVEN, shares[-1]) < 0.02


@pytest.mark.parametrize("multiple", [1, 4])
def test_the_way_back_to_even_shares_is_no_faster(multiple: int) -> None:
    def workers(step: int) -> Sequence[Speed]:
        return UNEVEN if step < 20 else [Speed(0.0, 1.0)] * 3

    shares = simulate(BySpeed(every=1, change=1.25, multiple=multiple), workers, 50, batch=480)
    assert idle(UNEVEN, shares[20]) < 0.05
    for before, after in itertools.pairwise(shares):
        for old, new in zip(before, after, strict=True):
            assert old / 1.25 <= new <= max(old * 1.25, old + multiple)
    assert shares[-1] == [160, 160, 160]
    policy = BySpeed(every=1, change=math.inf)
    assert simulate(policy, workers, 50, batch=480)[22] == [160, 160, 160]
    assert policy.speeds == []


def test_a_disturbance_is_answered_with_the_next_plan_and_forgotten_after_it() -> None:
    def workers(step: int) -> list[Speed]:
        return [Speed(0.0, 2.0 if 40 <= step < 80 and rank == 0 else 1.0) for rank in range(3)]

    shares = simulate(BySpeed(every=10), workers, 120)
    for step in (*range(60, 80), *range(100, 120)):  # two plans after each change
        assert idle(workers(step), shares[step]) < 0.05
    assert idle(workers(45), shares[45]) > 0.2


def test_noise_on_an_even_cluster_changes_next_to_nothing() -> None:
    even = [Speed(0.0, 1.0)] * 4
    shares = simulate(BySpeed(every=20), lambda step: even, 400, noise=0.1)
    for each in shares:
        assert max(each) <= 128 * 1.05
        assert min(each) >= 128 * 0.95


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_noise_between_rounds_does_not_move_shares_of_equal_workers(workers: int) -> None:
    """A round of Local SGD is one sample, and one look: its own noise cannot be seen in it, but in other rounds."""
    even = Even().split(64 * workers, workers)
    moved = 0
    for seed in range(10):
        drawn, policy = random.Random(seed), BySpeed(every=20)
        for at in range(50):
            shares = policy.split(64 * workers, workers)
            moved += shares != even
            seconds = [20.0 * share * drawn.lognormvariate(0, 0.05) for share in shares]
            policy.observe(a_round(20 * at, shares, seconds, steps=20))
    assert moved <= 10  # of 500; where rounds were trusted, it was 47, 181 and 304


def test_a_model_knows_how_far_it_can_be_wrong() -> None:
    def error(*looks: tuple[float, float | None]) -> float:
        model = SpeedModel()
        for seconds, each in looks:
            model.add(Typical(100, seconds, each), usual=100)
        return model.error

    assert error() == 0.0
    assert error((1.0, 0.04)) == pytest.approx(0.04)
    assert error((1.0, 0.04), (1.1, 0.03)) == pytest.approx(0.025)
    assert error((1.0, None)) == pytest.approx(0.05)  # assumed
    assert error((1.0, None), (math.exp(0.1), None)) == pytest.approx(0.05)  # half of their difference
    assert error((1.0, None), (math.exp(0.1), 0.01), (math.exp(0.2), 0.01)) == pytest.approx(0.1 / 3**0.5)


def test_who_adds_little_does_not_wait_long_either() -> None:
    """The slowest of three becomes faster by a ninth, which makes the step shorter by less than the dead band."""
    faster = [*UNEVEN[:2], Speed(0.0, 3.6)]

    def workers(step: int) -> list[Speed]:
        return UNEVEN if step < 20 else faster

    shares = simulate(BySpeed(every=5), workers, 60)
    assert makespan(faster, [287, 144, 81]) > 0.98 * makespan(faster, shares[20])
    assert longest_wait(faster, shares[20]) > 0.09
    assert longest_wait(faster, shares[-1]) < 0.04


def test_what_was_seen_while_others_waited_does_not_count_any_more() -> None:
    """The second of three on one machine becomes slower as soon as the others have enough to do."""
    beside = [UNEVEN[0], Speed(0.0, 2.3), UNEVEN[2]]

    def workers(step: int) -> list[Speed]:
        return UNEVEN if step < 5 else beside

    shares = simulate(BySpeed(every=5, change=10.0), workers, 11, batch=448)
    assert shares[5] == [256, 128, 64]
    assert longest_wait(beside, shares[10]) < 0.05  # two plans


def test_outliers_do_not_count() -> None:
    def workers(step: int) -> list[Speed]:
        return [Speed(0.0, 30.0 if step % 9 == 4 else 1.0), Speed(0.0, 1.0)]

    assert all(shares == [256, 256] for shares in simulate(BySpeed(every=9), workers, 60))
    assert typical([(10, 1.0), (10, 1.2), (10, 50.0), (0, 0.0)]) == pytest.approx((10, 1.1, 1 / 11))
    assert typical([(0, 0.0)]) is None


def test_shares_follow_a_batch_that_changes_at_once() -> None:
    policy = BySpeed(every=5, change=10.0)
    simulate(policy, lambda step: UNEVEN, 10)
    assert policy.split(1024, 3) == [586, 292, 146]
    assert policy.split(7, 3) == [4, 2, 1]
    assert policy.split(2, 3) == [2, 0, 0]  # fewer than one for each: the end of an epoch
    assert policy.split(512, 2) == [256, 256]  # another number of workers: nothing is known


def test_bounds() -> None:
    policy = BySpeed(every=5, change=10.0, most=[200, 512, 512], least=80)
    shares = simulate(policy, lambda step: UNEVEN, 10)
    assert shares[-1] == [200, 208, 104]
    policy = BySpeed(every=5, change=10.0, multiple=32)
    assert simulate(policy, lambda step: UNEVEN, 10)[-1] == [320, 128, 64]


def test_state_is_taken_back() -> None:
    first = BySpeed(every=4)
    simulate(first, lambda step: UNEVEN, 6)
    second = BySpeed(every=4)
    second.load_state_dict(first.state_dict())
    assert simulate(first, lambda step: UNEVEN, 20) == simulate(second, lambda step: UNEVEN, 20)
    assert first.state_dict() == second.state_dict()


def test_a_model_is_proportional_until_two_sizes_were_seen() -> None:
    assert SpeedModel().speed is None

    def after(*looks: tuple[float, float]) -> Speed:
        model = SpeedModel()
        for examples, seconds in looks:
            model.add(Typical(examples, seconds, 0.0), usual=100)
        assert model.speed is not None
        return model.speed

    assert after((100, 2.0)) == pytest.approx((0.0, 0.02))
    # Too near to tell anything.
    assert after((100, 2.0), (102, 2.1)) == pytest.approx((0.0, math.sqrt(0.02 * 2.1 / 102)))
    # The line through the last two is 1.08 + 0.01 n.
    assert after((100, 2.0), (102, 2.1), (204, 3.12)) == pytest.approx((1.08, 0.01), rel=0.1)


def test_a_speed_is_a_mean_until_it_jumps() -> None:
    model = SpeedModel(memory=3)
    for seconds in (9.0, 1.0, 1.1, 0.9, 1.0):
        model.add(Typical(100, seconds, 0.0), usual=100)
    assert model.speed == pytest.approx((0.0, 0.01 * (1.1 * 0.9) ** (1 / 3)))  # of the last three
    model.add(Typical(100, 2.0, 0.0), usual=100)
    assert model.speed == pytest.approx((0.0, 0.02))  # at once
    model.add(Typical(100, 2.2, 0.0), usual=100)
    assert model.speed == pytest.approx((0.0, 0.01 * math.sqrt(2.0 * 2.2)))
    last = SpeedModel(memory=1)
    for seconds in (1.0, 1.1):
        last.add(Typical(100, seconds, 0.0), usual=100)
    assert last.speed == pytest.approx((0.0, 0.011))


@pytest.mark.parametrize("worth", [0.0, 1.0, 30.0, 500.0])
def test_what_the_fixed_part_is_worth(worth: float) -> None:
    low, high = 20.0, 90.0
    slope = math.log((worth + high) / (worth + low)) / math.log(high / low)
    assert worth_of(slope, low, high, most=1000.0) == pytest.approx(worth, abs=1e-6)
    assert worth_of(slope, low, high, most=10.0) == pytest.approx(min(worth, 10.0), abs=1e-6)
    assert worth_of(-0.5, low, high, most=1000.0) == pytest.approx(1000.0)  # more examples took less time: noise
    assert worth_of(1.5, low, high, most=1000.0) == 0.0


def test_speeds_that_wander_do_not_lead_shares_astray() -> None:
    """What a worker takes for an example goes up and down by 7 % from look to look, and comes back."""

    def waiting(memory: int, seed: int) -> float:
        drawn = random.Random(seed)
        away = [[drawn.gauss(0, 0.07) for _ in UNEVEN] for _ in range(40)]

        def workers(step: int) -> list[Speed]:
            each = away[step // 10]
            return [Speed(0.0, one.per_example * math.exp(more)) for one, more in zip(UNEVEN, each, strict=True)]

        shares = simulate(BySpeed(every=10, memory=memory), workers, 400, batch=192, noise=0.05, seed=seed)
        return sum(idle(workers(step), shares[step]) for step in range(20, 400)) / 380

    with_memory = sum(waiting(5, seed) for seed in range(10)) / 10
    without = sum(waiting(1, seed) for seed in range(10)) / 10
    assert with_memory < 0.85 * without
    assert with_memory < 0.07  # shares that are right on average wait for 5 %


def test_weights_that_are_known() -> None:
    assert Fixed([2, 1, 1]).split(64, 3) == [32, 16, 16]
    assert Fixed([13.7, 16.5, 19.6, 14.2]).split(64, 4) == [14, 16, 20, 14]


@pytest.mark.parametrize("make", [tuple, np.array, torch.tensor])
def test_numbers_may_come_in_an_array(make: Callable[[list[int]], Any]) -> None:
    assert Fixed(make([2, 1, 1])) == Fixed([2, 1, 1])
    assert Fixed(make([2, 1, 1])).split(64, 3) == [32, 16, 16]
    assert BySpeed(most=make([40, 64])) == BySpeed(most=[40, 64])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BySpeed(every=0), "every"),
        (lambda: BySpeed(every=True), r"every \(True\) must be a whole number of at least 1"),
        (lambda: BySpeed(least="2"), r"least \('2'\) must be a whole number of at least 0"),  # type: ignore[arg-type]
        (lambda: BySpeed(dead_band=None), r"dead_band \(None\) must be a number"),  # type: ignore[arg-type]
        (lambda: BySpeed(change="2"), r"change \('2'\) must be a number above 1"),  # type: ignore[arg-type]
        (lambda: BySpeed(most=True), r"most \(True\) must be a whole number"),
        (lambda: BySpeed(multiple=0), "multiple"),
        (lambda: BySpeed(least=-1), "least"),
        (lambda: BySpeed(dead_band=1.0), "dead_band"),
        (lambda: BySpeed(change=1.0), "change"),
        (lambda: BySpeed(most=0), "most"),
        (lambda: BySpeed(most=64.0), "most"),  # type: ignore[arg-type]
        (lambda: BySpeed(most="64"), "most"),  # type: ignore[arg-type]
        (lambda: BySpeed(most=[64, 2.5]), "most"),  # type: ignore[list-item]
        (lambda: BySpeed(most=[4], least=1).split(8, 2), "1 numbers for 2 workers"),
        (lambda: BySpeed(most=[2, 2]).split(8, 2), "more than all workers can take"),
        (lambda: Fixed([]), "weights"),
        (lambda: Fixed(3), r"weights \(3\) must be a list of numbers, .*: Fixed\(\[2, 1\]\)"),  # type: ignore[arg-type]
        (lambda: Fixed("21"), r"weights \('21'\) must be a list"),  # type: ignore[arg-type]
        (lambda: Fixed(None), r"weights \(None\) must be a list"),  # type: ignore[arg-type]
        (lambda: Fixed(["2", "1"]), r"weights \(\['2', '1'\]\) must be a list"),  # type: ignore[list-item]
        (lambda: Fixed(torch.ones(2, 2)), "must be a list"),  # type: ignore[arg-type]
        (lambda: Fixed(np.array([1.0, np.nan])), r"weights \(\[1.0, nan\]\) must be at least 0, finite"),  # type: ignore[arg-type]
        (lambda: Fixed([0, 0]), "weights"),
        (lambda: Fixed([1, 2]).split(8, 3), "give each one"),
    ],
)
def test_bad_settings(make: Callable[[], object], words: str) -> None:
    with pytest.raises(pl.SettingError, match=words):
        make()


def test_as_published_it_reacts_once_an_epoch() -> None:
    policy = BySpeed.per_epoch()
    found = []
    for step in range(30):
        shares = policy.split(512, 3)
        found.append(shares)
        seconds = [finish(one, share) for one, share in zip(UNEVEN, shares, strict=True)]
        one = a_round(step, shares, seconds)
        policy.observe(in_epoch(step // 10, one))
    changes = [step for step in range(1, 30) if found[step] != found[step - 1]]
    assert changes == [11]  # known after the first step of the next epoch; after that nothing changes
    assert found[-1] == [293, 146, 73]


BURDEN = [Speed(0.0, 1.0), Speed(0.0, 1.0), Speed(0.0, 100.0)]


def test_a_worker_that_costs_more_than_it_gives_is_named_once() -> None:
    policy = BySpeed(every=2, change=100.0)
    shares = simulate(policy, lambda step: BURDEN, 20, batch=30)
    assert shares[-1] == [15, 14, 1]
    assert policy.remarks() == [
        "worker 2 is so slow (100 s for a step of 1 example) that the others would be done sooner without "
        "it; BySpeed(leave_out=True) "
        "would give it nothing to do"
    ]
    assert policy.remarks() == []


def test_it_is_left_out_if_asked_and_comes_back_when_the_others_have_become_slower() -> None:
    def workers(step: int) -> list[Speed]:
        return BURDEN if step < 20 else [Speed(0.0, 50.0), Speed(0.0, 50.0), Speed(0.0, 100.0)]

    policy = BySpeed(every=2, change=100.0, leave_out=True)
    shares = simulate(policy, workers, 40, batch=30)
    assert shares[10] == [15, 15, 0]
    assert shares[-1] == [12, 12, 6]
    [remark] = policy.remarks()
    assert remark.endswith("it gets nothing to do")


def test_the_noise_of_a_worker_that_is_left_out_does_not_count() -> None:
    """When it was measured the last time, nothing was certain about it; of the others everything is."""
    policy = BySpeed(every=4, change=100.0, leave_out=True)
    for step in range(40):
        shares = policy.split(30, 3)
        noisy = 100.0 * (0.7 if step % 2 else 1.3)
        speeds = [Speed(0.0, 1.0), Speed(0.0, 1.0 if step < 20 else 1.2), Speed(0.0, noisy)]
        policy.observe(a_round(step, shares, [finish(one, n) for one, n in zip(speeds, shares, strict=True)]))
        assert (step < 4) == (shares[2] > 0)
    assert shares == [16, 14, 0]


def test_a_slow_worker_that_helps_is_no_burden() -> None:
    policy = BySpeed(every=2)
    simulate(policy, lambda step: UNEVEN, 20)
    assert policy.remarks() == []


def with_limits(step: int, shares: Sequence[int], limits: Sequence[int]) -> Round:
    one = a_round(step, shares, [float(share) for share in shares])
    notes = tuple(msgspec.structs.replace(note, most=most) for note, most in zip(one.notes, limits, strict=True))
    return Round(one.plan, notes)


def test_a_limit_that_a_worker_has_found_counts_at_once() -> None:
    policy = BySpeed(every=100)
    policy.observe(with_limits(0, [32, 32], [0, 20]))
    assert policy.split(64, 2) == [44, 20]
    assert policy.remarks() == [
        "worker 1 ran out of memory; its share is at most 20 from now on, as long as the others have room for the rest"
    ]
    # Not all could be given to somebody: then in several pieces.
    policy.observe(with_limits(1, [44, 20], [25, 20]))
    assert policy.split(64, 2) == [32, 32]
    assert BySpeed(most=[40, 64]).split(64, 2) == [32, 32]
    assert BySpeed(most=[20, 64]).split(64, 2) == [20, 44]


def test_the_short_last_step_of_an_epoch_does_not_decide() -> None:
    """A look falls on it; shares are for whole batches."""
    policy = BySpeed(every=4)
    for at in range(16):
        shares = policy.split(1 if at % 4 == 3 else 20, 3)
        policy.observe(a_round(at, shares, [finish(one, n) for one, n in zip(reversed(UNEVEN), shares, strict=True)]))
    assert policy.split(20, 3) == [3, 6, 11]


@pytest.mark.parametrize("policy", [BySpeed.per_epoch(), BySpeed(every=1, change=math.inf)])
def test_a_worker_without_examples_is_no_error(policy: BySpeed) -> None:
    for at in range(30):
        shares = policy.split(1 if at % 5 == 4 else 12, 3)
        seconds = [finish(one, share) for one, share in zip(UNEVEN, shares, strict=True)]
        one = a_round(at, shares, seconds)
        policy.observe(in_epoch(at // 5, one))
    assert makespan(UNEVEN, policy.split(12, 3)) == 8.0  # the best that there is


def test_multiples_that_leave_nothing_to_one_worker_do_not_stop_the_rest() -> None:
    speeds = [*UNEVEN, Speed(0.0, 1.0)]
    shares = simulate(BySpeed(every=2, multiple=32), lambda step: speeds, 20, batch=96)
    assert sorted(shares[0]) == [0, 32, 32, 32]
    assert makespan(speeds, shares[0]) == 128.0
    assert makespan(speeds, shares[-1]) == 64.0  # the best that there is


def test_of_two_steps_the_usual_one_is_the_faster() -> None:
    assert typical([(32, 1.0), (32, 50.0)]) == (32, 1.0, None)


def test_who_is_left_out_is_needed_when_the_others_have_no_room() -> None:
    policy = BySpeed(every=2, change=100.0, leave_out=True, most=32)
    simulate(policy, lambda step: BURDEN, 20, batch=64)
    assert policy.split(64, 3) == [32, 32, 0]
    assert policy.split(80, 3) == [32, 32, 16]
    policy = BySpeed(every=2, change=100.0, leave_out=True)
    simulate(policy, lambda step: BURDEN, 20, batch=30)
    policy.observe(with_limits(0, [15, 15, 0], [10, 10, 0]))
    assert policy.split(30, 3) == [10, 10, 10]


def test_samples_of_a_long_epoch_do_not_fill_the_checkpoint() -> None:
    policy = BySpeed.per_epoch()
    for at in range(1000):
        policy.observe(a_round(at, [8, 8], [1.0, 1.0]))
    assert max(map(len, policy.state_dict()["samples"])) <= 256


def _always(speeds: Sequence[Speed]) -> Callable[[int], Sequence[Speed]]:
    return lambda step: speeds


@pytest.mark.parametrize("fixed", [1.0, 0.9, 0.5])
def test_shares_that_hardly_matter_do_not_run_away(fixed: float) -> None:
    """Where most of a step is fixed time, nothing tells equal workers apart but noise."""
    for seed in range(5):
        even = [Speed(fixed * 32, 1 - fixed)] * 2
        shares = simulate(BySpeed(every=4), _always(even), 1200, batch=64, noise=0.1, seed=seed)
        assert sum(map(min, shares)) / len(shares) > 30


def test_a_noisy_look_does_not_undo_good_shares() -> None:
    speeds = [Speed(0.0, 1.0), Speed(0.0, 1.0), Speed(0.0, 1.5)]
    policy = BySpeed(every=2)
    good = simulate(policy, _always(speeds), 20, batch=144)[-1]
    assert makespan(speeds, good) == 54.0
    for at, longer in ((20, 1.0), (21, 1.3)):
        times = [finish(one, share) for one, share in zip(speeds, good, strict=True)]
        policy.observe(a_round(at, good, [times[0], times[1] * longer, times[2]]))
    assert policy.split(144, 3) == good


@pytest.mark.parametrize("multiple", [1, 8])
def test_a_worker_that_costs_too_much_is_known_in_whole_pieces_too(multiple: int) -> None:
    policy = BySpeed(every=2, multiple=multiple)
    simulate(policy, _always(BURDEN), 20, batch=64)
    [remark] = policy.remarks()
    assert remark.startswith("worker 2 is so slow")
    policy = BySpeed(every=2, multiple=multiple, leave_out=True)
    assert simulate(policy, _always(BURDEN), 20, batch=64)[-1] == [32, 32, 0]


def test_a_share_may_be_nothing_if_the_smallest_is_0() -> None:
    policy = BySpeed(every=2, least=0)
    assert simulate(policy, _always(BURDEN), 40, batch=30)[-1] == [15, 15, 0]
    [remark] = policy.remarks()
    assert remark.startswith("worker 2 is so slow")
    assert remark.endswith("it gets nothing to do")


def test_two_workers_that_cost_too_much_are_both_named() -> None:
    policy = BySpeed(every=2, change=100.0, leave_out=True)
    speeds = [*BURDEN, Speed(0.0, 100.0)]
    assert simulate(policy, _always(speeds), 20, batch=30)[-1] == [15, 15, 0, 0]
    assert [remark[:8] for remark in policy.remarks()] == ["worker 2", "worker 3"]


@pytest.mark.parametrize(("change", "multiple"), [(1.1, 1), (1.5, 1), (1.5, 32)])
def test_small_shares_can_change_by_one_piece(change: float, multiple: int) -> None:
    shares = simulate(BySpeed(every=2, change=change, multiple=multiple), _always(UNEVEN), 40, batch=6 * multiple)
    assert makespan(UNEVEN, shares[0]) == 8.0 * multiple
    assert makespan(UNEVEN, shares[-1]) == 4.0 * multiple  # the best that there is


def test_a_smallest_share_that_binds_stays_so_when_the_batch_grows() -> None:
    policy = BySpeed(every=2, least=8)
    assert simulate(policy, _always(BURDEN), 20, batch=64)[-1] == [28, 28, 8]
    assert policy.split(128, 3) == [60, 60, 8]


def test_a_batch_that_is_too_small_for_the_smallest_shares_is_told_once() -> None:
    policy = BySpeed(every=2, least=40)
    simulate(policy, _always(UNEVEN[:2]), 20, batch=64)
    assert policy.remarks() == [
        "BySpeed: a batch of 64 is too small for a share of at least 40 for each of 2 workers; the slowest get "
        "nothing. Lower least, or raise the batch"
    ]
    simulate(policy := BySpeed(every=2, least=40), _always(UNEVEN[:2]), 20, batch=30)
    [remark] = policy.remarks()
    assert "at least 40 for each of 2 workers; shares go without that" in remark
    assert policy.split(30, 2) == [20, 10]


def test_a_short_step_has_shares_of_the_smallest_size_or_none() -> None:
    """Statistics over a single example would be an error of BatchNorm."""
    policy = BySpeed(every=5, change=10.0, least=2)
    assert [policy.split(n, 3) for n in (7, 6, 5, 4, 3, 2, 1)] == [
        [3, 2, 2],
        [2, 2, 2],
        [3, 2, 0],
        [2, 2, 0],
        [3, 0, 0],
        [2, 0, 0],
        [1, 0, 0],
    ]
    simulate(policy, _always([UNEVEN[1], UNEVEN[2], UNEVEN[0]]), 10)
    assert policy.split(6, 3) == [2, 2, 2]
    assert policy.split(5, 3) == [2, 0, 3]  # nothing for the slowest
    assert policy.split(3, 3) == [0, 0, 3]
    assert BySpeed(least=2, most=2).split(5, 3) == [2, 2, 1]  # the others have no room


def test_who_was_left_out_of_other_workers_is_not_left_out_of_these() -> None:
    policy = BySpeed(every=2, change=100.0, leave_out=True, multiple=8)
    simulate(policy, _always(BURDEN), 20, batch=64)
    assert policy.split(64, 3) == [32, 32, 0]
    assert policy.split(64, 4) == [16, 16, 16, 16]


def test_another_number_of_workers_begins_anew() -> None:
    """What is known of three says nothing of four: who of them is slow, and how far the next look is away."""
    policy = BySpeed(every=4, change=100.0, leave_out=True)
    simulate(policy, _always(BURDEN), 7, batch=64)
    assert policy.split(64, 3) == [32, 32, 0]
    resumed = BySpeed(every=4, change=100.0, leave_out=True)
    resumed.load_state_dict(policy.state_dict())
    fresh = BySpeed(every=4, change=100.0, leave_out=True)
    for each in (resumed, fresh):
        assert simulate(each, _always([*UNEVEN, Speed(0.0, 1.0)]), 4, batch=28)[-1] == [7, 7, 7, 7]
    assert resumed.state_dict() == fresh.state_dict()
    published = BySpeed.per_epoch()
    published.observe(in_epoch(3, a_round(0, [8, 8], [1.0, 2.0])))
    published.observe(in_epoch(5, a_round(0, [8, 8, 8], [1.0, 1.0, 2.0])))
    published.observe(in_epoch(6, a_round(0, [8, 8, 8], [1.0, 1.0, 2.0])))
    assert published.split(40, 3) == [16, 16, 8]


def test_as_published_a_second_run_begins_anew() -> None:
    """Its first epoch is no later one of the run before, and is not mixed with the last of that."""
    policy = BySpeed.per_epoch()
    for epoch in range(3):
        policy.observe(in_epoch(epoch, a_round(epoch, [32, 32], [1.0, 1.0])))
    assert policy.split(64, 2) == [32, 32]
    for epoch in range(2):
        policy.observe(in_epoch(epoch, a_round(epoch, [32, 32], [1.0, 3.0])))
    assert policy.split(64, 2) == [48, 16]


def test_as_published_every_second_of_an_epoch_counts() -> None:
    """One step of ten takes ten times as long: 19 seconds for ten steps against 10."""
    policy = BySpeed.per_epoch()
    for at in range(11):
        one = a_round(at, [32, 32], [1.0, 10.0 if at == 4 else 1.0])
        policy.observe(in_epoch(at // 10, one))
    assert policy.split(64, 2) == [42, 22]  # 64 in proportion to 1 / 10 and 1 / 19


def test_what_is_proportional_forgets_the_fixed_part_of_a_checkpoint() -> None:
    learnt, proportional = SpeedModel(), SpeedModel(affine=False)
    for examples in (16, 32, 64, 32, 16):
        learnt.add(Typical(examples, 20.0 + examples, 0.0), usual=32)
    assert learnt.speed is not None
    assert learnt.speed.fixed > 10
    proportional.load_state_dict(learnt.state_dict())
    assert proportional.speed is not None
    assert proportional.speed.fixed == 0.0


def test_caps_are_whole_pieces_where_shares_are() -> None:
    assert BySpeed(most=[40, 64, 64], multiple=32).split(128, 3) == [32, 64, 32]


def test_waiting_that_looks_like_work_is_refused() -> None:
    policy = BySpeed(every=2)
    with pytest.raises(pl.SettingError, match="cannot tell work from waiting"):
        policy.observe(a_round(0, [8, 8], [0.0, 0.0]))


def test_who_had_nothing_may_get_any_share_where_changes_are_not_bounded() -> None:
    def workers(step: int) -> list[Speed]:
        return BURDEN if step < 20 else [Speed(0.0, 100.0), Speed(0.0, 100.0), Speed(0.0, 100.0)]

    shares = simulate(BySpeed(every=2, least=0, change=math.inf), workers, 40, batch=30)
    assert shares[10] == [15, 15, 0]
    assert sorted(shares[-1]) == [10, 10, 10]


def test_who_gets_nothing_because_there_are_too_few_pieces_is_not_slow() -> None:
    policy = BySpeed(every=2, least=0, multiple=32)
    assert sorted(simulate(policy, _always([Speed(0.0, 1.0)] * 4), 20, batch=96)[-1]) == [0, 32, 32, 32]
    assert policy.remarks() == []
