"""Rounds of seconds: every worker does its own number of steps, and still every example counts exactly once.

Where a test needs to know how many steps a worker does, it moves the clock by which workers measure their rounds: a
step then takes exactly as long as the test says. Everything else is real.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import paceline as pl
from paceline import sync
from paceline.events import StepDone
from paceline.records import Progress, Round
from tests.laws.test_local_sgd import MAKERS, Workers
from tests.pool import Pool
from tests.problems import data, flat, mlp

LENGTH = 151  # prime: stripes, rounds and epochs end with ragged steps
PACES = (0.125, 1.0, 0.25)  # seconds of a step, for each worker: 8, 1 and 4 steps in a round of one second
SLOW_FIRST = (1.0, 0.125, 0.25)
ONE = sync.Seconds(1.0)
PHASES = ["before the inner loop", "in the inner loop", "before the optimizer", "after the optimizer"]


class Moved:
    """A clock that stands still but for what the test adds."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


@contextmanager
def clock(moved: bool) -> Iterator[Callable[[float], None]]:
    """Gives what spends the seconds of a step: on a clock of the test's, or truly."""
    if not moved:
        yield time.sleep
        return
    ours = Moved()
    with mock.patch("paceline.clock.time", ours):
        yield ours.spend


class Fetched(Dataset[Any]):
    """The same examples, fetched one by one, so that loader processes can."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, at: int) -> tuple[Tensor, ...]:
        return tuple(tensor[at] for tensor in self.tensors)


@dataclass(frozen=True)
class Job:
    """What the workers do."""

    paces: tuple[float, ...] = PACES
    every: Any = ONE
    goal: dict[str, int] = field(default_factory=lambda: {"epochs": 2})
    again: dict[str, int] | None = None
    """A second loop after the first."""
    moved: bool = True
    state: Any = sync.Keep()  # noqa: RUF009
    batch: int = 9
    lengths: tuple[int, ...] = (LENGTH,)
    """More than one: of data that each worker has for itself."""
    num_workers: int = 0
    leave: dict[int, tuple[int, str]] = field(default_factory=dict)
    """For each worker that leaves: after how many steps of its own, and where in the body."""
    stop: dict[int, int] = field(default_factory=dict)
    """For each worker that wants to stop: after how many steps of its own."""
    save: Path | None = None
    resume: Path | None = None
    checkpoint: dict[str, Any] | None = None


@dataclass
class Trace:
    """What one worker saw."""

    rounds: list[list[list[int]]] = field(default_factory=lambda: [[]])
    """The examples of every step that it did, by rounds."""
    met: list[list[int]] = field(default_factory=list)
    """At the end of every round, the steps that the workers say that they did."""
    epochs: list[int] = field(default_factory=list)
    """The epoch of every step that it did."""
    ended: list[bool] = field(default_factory=list)
    """Whether the step was said to end its epoch."""
    digest: str = ""
    progress: tuple[int, int, int] = (0, 0, 0)
    """Steps, epochs and examples at the end."""
    parameters: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def steps(self) -> list[list[int]]:
        return [step for one in self.rounds for step in one]

    def of(self, epoch: int) -> list[int]:
        """The examples of an epoch."""
        return [one for step, of in zip(self.steps, self.epochs, strict=True) if of == epoch for one in step]

    def meet(self, round: Round) -> None:
        self.met.append([int(note.steps) for note in round.notes])
        self.rounds.append([])


class Watched(pl.balance.Even):
    """Equal shares; sees every round, also that in which its worker leaves."""

    def __init__(self, observe: Callable[[Round], None]) -> None:
        self.observe = observe

    def __repr__(self) -> str:
        return "Watched()"


def examples(length: int) -> tuple[Tensor, Tensor, Tensor]:
    x, y = data(length).tensors
    return x.double(), y, torch.arange(length)


def work(job: Job) -> Trace:
    rank = int(os.environ.get("RANK", 0))
    tensors = examples(job.lengths[rank if len(job.lengths) > 1 else 0])
    model = mlp(dtype=torch.float64)
    optimizer = MAKERS["momentum"](model.parameters())
    trace = Trace()
    with (
        clock(job.moved) as spend,
        pl.Run(
            model,
            optimizer,
            Fetched(tensors) if job.num_workers else TensorDataset(*tensors),
            batch=job.batch,
            micro=2,
            balance=Watched(trace.meet),
            sync=sync.LocalSGD(job.every, optimizer_state=job.state),
            local_data=len(job.lengths) > 1,
            num_workers=job.num_workers,
            checkpoint=None if job.checkpoint is None else pl.Checkpoint(**job.checkpoint),
        ) as run,
    ):
        if job.resume is not None:
            assert run.resume(job.resume)
        _loop(job, run, job.goal, trace, spend, leave=True)
        if job.again is not None:
            with warnings.catch_warnings():  # some are through before they would leave
                warnings.filterwarnings("ignore", message="run.steps.* has nothing to do")
                _loop(job, run, job.again, trace, spend, leave=False)
        if job.save is not None:
            run.save(job.save)
        before = run.replica.digest()
        with run.consensus():
            trace.digest = run.replica.digest()
        assert trace.digest == before  # all workers have the same already
        trace.progress = run.progress.step, run.progress.epoch, run.progress.examples
        trace.parameters = flat(model)
        return trace


def _loop(
    job: Job, run: pl.Run, goal: dict[str, int], trace: Trace, spend: Callable[[float], None], leave: bool
) -> None:
    rank = run.fleet.rank
    at, phase = job.leave.get(rank, (-1, "")) if leave else (-1, "")
    for step in run.steps(**goal):
        here = phase if len(trace.steps) == at else ""
        if here == PHASES[0]:
            break
        if job.stop.get(rank) == len(trace.steps):
            run.stop()
        run.optimizer.zero_grad()
        used: list[int] = []
        for number, (x, y, ids) in enumerate(step):
            if here == PHASES[1] and number:
                break
            used += ids.tolist()
            step.backward(F.cross_entropy(run.model(x), y))
        if here in PHASES[1:3]:
            break
        spend(job.paces[rank])
        run.optimizer.step()
        trace.rounds[-1].append(used)
        trace.epochs.append(step.epoch)
        trace.ended.append(step.ends_epoch)
        if here == PHASES[3]:
            break


def check_agreement(traces: Sequence[Trace]) -> None:
    """All have the same model, and the same notion of how far they have come and of who did what."""
    assert len({trace.digest for trace in traces}) == 1
    assert len({trace.progress for trace in traces}) == 1
    assert sum(len(step) for trace in traces for step in trace.steps) == traces[0].progress[2]
    for rank, trace in enumerate(traces):
        assert trace.met == traces[0].met
        assert [len(one) for one in trace.rounds] == [*(steps[rank] for steps in trace.met), 0]
        assert all(all(one[1:]) for one in trace.rounds)  # who has nothing left to do waits for the others
    assert sum(map(max, traces[0].met)) == traces[0].progress[0]


def check_once(traces: Sequence[Trace], epochs: int = 2, length: int = LENGTH) -> None:
    for epoch in range(epochs):
        assert sorted(one for trace in traces for one in trace.of(epoch)) == list(range(length))


def by_hand(traces: Sequence[Trace], state: Any = sync.Keep()) -> Tensor:  # noqa: B008
    """Train all workers in one process on what they say that they used; average by examples after every round."""
    x, y, _ = examples(LENGTH)
    workers = Workers(len(traces), "momentum")
    for rounds in zip(*(trace.rounds for trace in traces), strict=True):
        for at in range(max(map(len, rounds))):
            parts = [one[at] if at < len(one) else [] for one in rounds]
            workers.step([torch.tensor(part, dtype=torch.int64) for part in parts], x, y)
        if sum(workers.used):
            workers.average(state)
    return flat(workers.models[0])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_who_is_fast_does_more(pool: Pool, num_workers: int) -> None:
    """With real seconds: all sleep in every step, worker 1 ten times as long.

    A fast worker must not get through the data in the first round, in which loader processes start at their leisure:
    of 151 steps it can do at most ten in a round.
    """
    job = Job(paces=(0.01, 0.1, 0.01), every=sync.Seconds(0.1), moved=False, num_workers=num_workers, batch=6)
    traces = pool.run(3, work, job)
    check_agreement(traces)
    check_once(traces)
    first, slow, third = (len(trace.steps) for trace in traces)
    assert slow < min(first, third)


@pytest.mark.parametrize("state", [sync.Keep(), sync.Average()], ids=["keep", "average"])
def test_models_count_as_much_as_they_have_used(pool: Pool, state: Any) -> None:
    """sum_i n_i x_i / sum_i n_i: the same as anybody would compute from what the workers used, in double precision."""
    traces = pool.run(3, work, Job(state=state))
    check_agreement(traces)
    check_once(traces)
    assert traces[0].met[:3] == [[8, 1, 4]] * 3
    assert traces[0].progress == (sum(map(max, traces[0].met)), 2, 2 * LENGTH)
    torch.testing.assert_close(traces[0].parameters, by_hand(traces, state), rtol=0, atol=1e-12)


def test_loader_processes_that_work_ahead_in_vain(pool: Pool) -> None:
    """What was fetched ahead for a worker may be dealt to another: the course is the same as without loaders."""
    for fetched, plain in zip(pool.run(3, work, Job(num_workers=1)), pool.run(3, work, Job()), strict=True):
        assert fetched.rounds == plain.rounds
        assert fetched.digest == plain.digest


def test_the_last_step_of_an_epoch(pool: Pool) -> None:
    """It is known after it, on every worker."""
    for trace in pool.run(3, work, Job(goal={"epochs": 3})):
        last = [now < following for now, following in zip(trace.epochs, [*trace.epochs[1:], 3], strict=True)]
        assert trace.ended == last
        assert sum(last) == 3


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("goal", "place"), [({"steps": 13}, (0, 13)), ({"steps": 16}, (0, 16)), ({"examples": 100}, (2, 100))]
)
def test_goals(pool: Pool, goal: dict[str, int], place: tuple[int, int], workers: int) -> None:
    """Exactly reached; a loop that follows goes on where it ended."""
    traces = pool.run(workers, work, Job(goal=goal))
    check_agreement(traces)
    assert traces[0].progress[place[0]] == place[1]
    traces = pool.run(workers, work, Job(goal=goal, again={"epochs": 2}))
    check_agreement(traces)
    check_once(traces)
    torch.testing.assert_close(traces[0].parameters, by_hand(traces), rtol=0, atol=1e-12)


@pytest.mark.parametrize("stop", [{0: 3}, {1: 1}, {2: 0, 0: 5}])
def test_one_worker_may_stop_all(pool: Pool, stop: dict[int, int]) -> None:
    traces = pool.run(3, work, Job(stop=stop))
    check_agreement(traces)
    assert traces[0].met == [[8, 1, 4]] * (2 if stop == {1: 1} else 1)
    traces = pool.run(3, work, Job(stop=stop, again={"epochs": 2}))
    check_agreement(traces)
    check_once(traces)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    leave=st.dictionaries(st.integers(0, 2), st.tuples(st.integers(0, 14), st.sampled_from(PHASES)), min_size=1),
    paces=st.permutations(PACES),
)
def test_workers_may_leave_at_any_phase_of_a_round(
    pool: Pool, leave: dict[int, tuple[int, str]], paces: list[float]
) -> None:
    """Nobody hangs; what a leaver has not used is dealt again; everybody's examples have their true weight."""
    traces = pool.run(3, work, Job(paces=tuple(paces), leave=leave, again={"epochs": 2}))
    check_agreement(traces)
    check_once(traces)
    torch.testing.assert_close(traces[0].parameters, by_hand(traces), rtol=0, atol=1e-12)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_all_may_leave(pool: Pool, at: int, phase: str) -> None:
    traces = pool.run(3, work, Job(leave=dict.fromkeys(range(3), (at, phase)), again={"epochs": 2}))
    check_agreement(traces)
    check_once(traces)
    torch.testing.assert_close(traces[0].parameters, by_hand(traces), rtol=0, atol=1e-12)


def together(folder: Path) -> tuple[list[str], list[str], tuple[str, int]]:
    """What was said to who saves or averages in the middle of a round, and what came of it where all meet."""
    model = mlp()
    optimizer = MAKERS["momentum"](model.parameters())
    said: list[str] = []
    seen: list[str] = []
    with clock(moved=True) as spend, pl.Run(model, optimizer, data(80), batch=9, sync=sync.LocalSGD(ONE)) as run:
        for step in run.steps(epochs=1):
            if step.index == 0:
                with pytest.raises(pl.LoopError) as error:
                    run.consensus()
                said.append(str(error.value))
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            spend(PACES[run.fleet.rank])
            optimizer.step()
            if step.round is None:
                own = run.replica.digest()
                for call in (run.consensus, lambda: run.save(folder / "no.ckpt")):
                    with pytest.raises(pl.LoopError) as error:
                        call()
                    said.append(str(error.value))
                assert own == run.replica.digest()
            else:
                run.save(folder / "yes.ckpt")
                with run.consensus():
                    seen.append(run.replica.digest())
        return said, seen, (run.replica.digest(), run.progress.examples)


def test_saving_and_averaging_only_where_all_meet(pool: Pool, tmp_path: Path) -> None:
    """A refusal has no consequences: the loop goes on."""
    said, seen, ends = zip(*pool.run(3, together, tmp_path), strict=True)
    assert [len(one) > 1 for one in said] == [True, False, True]  # worker 1 meets the others after every step
    for text in [text for one in said for text in one]:
        assert text.startswith(("run.consensus was called in the middle of a round", "run.save was called in the"))
        assert "call it in the steps where step.round is not None" in text
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) > 1
    assert len(set(ends)) == 1
    assert ends[0][1] == 80
    assert [path.name for path in tmp_path.iterdir()] == ["yes.ckpt"]


@pytest.mark.parametrize("paces", [PACES, SLOW_FIRST], ids=["fast", "slow"])
def test_checkpoints_by_itself_and_resume(pool: Pool, tmp_path: Path, paces: tuple[float, ...]) -> None:
    """Whether the first worker, which decides, is fast or slow; with the clock steered, the course is the same."""
    saves = {"folder": tmp_path, "every": 4, "keep": 100}
    never = pool.run(3, work, Job(paces=paces))
    saved = pool.run(3, work, Job(paces=paces, checkpoint=saves))
    check_once(saved)
    assert [trace.digest for trace in saved] == [trace.digest for trace in never]
    ends = [sum(map(max, never[0].met[: at + 1])) for at in range(len(never[0].met))]
    due = [end for before, end in zip([0, *ends], ends, strict=False) if end // 4 > before // 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}.ckpt" for step in due]
    for step in due[::2]:
        resumed = pool.run(3, work, Job(paces=paces, resume=tmp_path / f"step-{step:08d}.ckpt"))
        at = ends.index(step) + 1
        for rank in range(3):
            assert resumed[rank].rounds == never[rank].rounds[at:]
            assert resumed[rank].progress == never[rank].progress
            assert resumed[rank].digest == never[rank].digest


@pytest.mark.parametrize(("workers", "every"), [(1, ONE), (2, ONE), (4, ONE), (2, 4)])
def test_saved_by_three_resumed_by_others(pool: Pool, tmp_path: Path, workers: int, every: Any) -> None:
    """Also by such as do rounds of steps: what is left of the epoch has gaps."""
    before = pool.run(3, work, Job(goal={"steps": 20}, save=tmp_path / "at.ckpt"))
    assert before[0].progress[1] == 0
    after = pool.run(workers, work, Job(paces=(*PACES, 0.5), every=every, resume=tmp_path / "at.ckpt"))
    assert len({(trace.digest, trace.progress) for trace in after}) == 1
    check_once([*before, *after])


@pytest.mark.parametrize("lengths", [(20, 47, 61), (90, 3, 1)])
def test_data_of_their_own(pool: Pool, lengths: tuple[int, ...]) -> None:
    """Who is through with its own waits for the others with empty steps."""
    traces = pool.run(3, work, Job(lengths=lengths, goal={"examples": 25}, again={"epochs": 2}))
    check_agreement(traces)
    for trace, length in zip(traces, lengths, strict=True):
        check_once([trace], length=length)


def test_together_at_first(pool: Pool) -> None:
    traces = pool.run(3, work, Job(every=sync.PostLocal(4, ONE)))
    check_agreement(traces)
    check_once(traces)
    assert traces[0].met[:6] == [[1, 1, 1]] * 4 + [[8, 1, 4]] * 2
    torch.testing.assert_close(traces[0].parameters, by_hand(traces), rtol=0, atol=1e-12)


def test_together_at_first_with_real_seconds(pool: Pool) -> None:
    job = Job(every=sync.PostLocal(4, sync.Seconds(0.05)), paces=(0.0, 0.01, 0.0), moved=False)
    traces = pool.run(3, work, job)
    check_agreement(traces)
    check_once(traces)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_alone(num_workers: int) -> None:
    """Without a launcher."""
    (trace,) = traces = [work(Job(paces=(0.25,), num_workers=num_workers))]
    check_agreement(traces)
    check_once(traces)
    assert trace.met[:2] == [[4], [4]]
    torch.testing.assert_close(trace.parameters, by_hand(traces), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("pace", "steps"), [(3.0, 1), (0.4375, 2), (0.375, 3), (0.125, 8)])
def test_a_round_ends_with_the_step_that_comes_nearest(pace: float, steps: int) -> None:
    trace = work(Job(paces=(pace,), goal={"epochs": 1}))
    assert trace.met[:2] == [[steps], [steps]]


class Broken(Fetched):
    """One of its examples cannot be read at the first attempt."""

    def __init__(self, length: int) -> None:
        super().__init__(examples(length))
        self.failed = False

    def __getitem__(self, at: int) -> tuple[Tensor, ...]:
        if at == 13 and not self.failed:
            self.failed = True
            raise OSError("a passing trouble")
        return super().__getitem__(at)


def test_who_is_alone_may_go_on_after_an_error() -> None:
    """In the middle of a round, in the middle of a step: the steps that were done count, the broken one does not."""
    model = mlp(dtype=torch.float64)
    optimizer = MAKERS["momentum"](model.parameters())
    job, trace, dataset = Job(paces=(0.125,)), Trace(), Broken(LENGTH)
    order = pl.order.Sequential()
    with (
        clock(moved=True) as spend,
        pl.Run(model, optimizer, dataset, batch=4, order=order, micro=2, sync=sync.LocalSGD(ONE)) as run,
    ):
        with pytest.raises(OSError, match="a passing trouble"):
            _loop(job, run, {"epochs": 1}, trace, spend, leave=False)
        assert (run.progress.step, run.progress.examples) == (3, 12)
        _loop(job, run, {"epochs": 1}, trace, spend, leave=False)
    check_once([trace], epochs=1)


class Later:
    """Rounds of so many steps; measured by the clock if they begin after so many steps or examples."""

    def __init__(self, count: int, steps: int = 0, examples: int = 0) -> None:
        self.count, self.from_here = count, Progress(step=steps, examples=examples)

    def __repr__(self) -> str:
        return "Later()"

    def ends(self, begin: Progress, now: Progress) -> bool:
        return now.step - begin.step >= self.count

    def seconds(self, begin: Progress) -> float | None:
        late = begin.step >= self.from_here.step and begin.examples >= self.from_here.examples
        return 1.0 if late else None


@pytest.mark.parametrize(
    ("every", "met"),
    [(Later(4, steps=6), [[4, 4, 4]] * 2 + [[8, 1, 4]] * 2), (Later(2, examples=50), [[2, 2, 2]] * 3 + [[8, 1, 4]])],
    ids=["steps", "examples"],
)
def test_how_a_round_is_measured_is_decided_when_it_begins(pool: Pool, every: Any, met: list[list[int]]) -> None:
    """By a schedule of the user's own."""
    traces = pool.run(3, work, Job(every=every))
    assert traces[0].met[: len(met)] == met
    check_agreement(traces)
    check_once(traces)


def recorded() -> list[StepDone]:
    seen: list[StepDone] = []

    class Keeps:
        def record(self, event: Any) -> None:
            if isinstance(event, StepDone):
                seen.append(event)

        def close(self) -> None:
            pass

    model = mlp()
    optimizer = MAKERS["sgd"](model.parameters())
    run = pl.Run(model, optimizer, data(100), batch=6, sync=sync.LocalSGD(ONE), record=[Keeps()])
    with clock(moved=True) as spend, run:
        for step in run.steps(epochs=1):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            spend(SLOW_FIRST[run.fleet.rank])
            optimizer.step()
    return seen


def test_the_record_shows_what_each_has_done(pool: Pool) -> None:
    found, *nothing = pool.run(3, recorded)
    assert nothing == [[], []]
    assert [(event.step, event.steps, event.counts, event.examples) for event in found[:3]] == [
        (7, 8, [2, 16, 8], 26),
        (15, 8, [2, 16, 8], 52),
        (23, 8, [2, 16, 8], 78),
    ]
    assert found[-1].examples == 100


def rates() -> tuple[list[tuple[int, float]], list[int]]:
    """This worker's examples and factor of the learning rate in each step, and the batch of every round."""
    model = mlp()
    optimizer = MAKERS["sgd"](model.parameters())
    (rate,) = (group["lr"] for group in optimizer.param_groups)
    found: list[tuple[int, float]] = []
    batches: list[int] = []
    used: list[float] = []

    def keep(optimizer: Any, *_: Any) -> None:
        used.append(optimizer.param_groups[0]["lr"] / rate)

    watched = Watched(lambda round: batches.append(round.plan.batch))
    settings: dict[str, Any] = {"balance": watched, "lr": pl.lr.Linear(base=3), "sync": sync.LocalSGD(ONE)}
    with clock(moved=True) as spend, pl.Run(model, optimizer, data(LENGTH), batch=9, **settings) as run:
        optimizer.register_step_pre_hook(keep)  # after the run's own, which applies the rule
        for step in run.steps(epochs=1):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            spend(SLOW_FIRST[run.fleet.rank])
            optimizer.step()
            found.append((step.plan.counts[run.fleet.rank], used[-1]))
    return found, batches


def test_the_learning_rate_is_that_of_a_batch_of_all(pool: Pool) -> None:
    """Also after the slow worker could have used up what it was dealt; a short step has as much less of it."""
    for found, batches in pool.run(3, rates):
        assert len(found) > 2
        assert [factor for _, factor in found] == pytest.approx([count / 3 * 9 / 3 for count, _ in found])
        assert set(batches[:-1]) == {9}
        assert batches[-1] <= 9


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, "1", None], ids=repr)
def test_no_length_of_a_round(seconds: Any) -> None:
    for every in (sync.Seconds(seconds), sync.PostLocal(4, sync.Seconds(seconds))):
        with pytest.raises(pl.SettingError, match=r"Seconds\(count=.*\)\) must be a positive number of seconds"):
            sync.LocalSGD(every)
