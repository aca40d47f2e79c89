"""Averages in the background: what one would simulate in one process; all workers end alike, whoever leaves when."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import paceline as pl
from paceline import sync
from tests.laws.test_local_sgd import BATCH, Skewed
from tests.pool import Pool
from tests.problems import data, flat, mlp, train

WORKERS = 3
EVERY = 4
ENDS = 11  # in the middle of the third round
BEFORE, AFTER = "before the optimizer", "after the optimizer"


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how; roles belong to one run, so that every worker makes its own."""

    overlap: int
    state: Any = sync.Keep()  # noqa: RUF009
    outer: bool = False
    with_batch_norm: bool = False

    @property
    def length(self) -> int:
        """A prime number of examples: ragged steps, with none for rank 0. BatchNorm refuses shares of one example."""
        return 60 if self.with_batch_norm else 61

    def role(self) -> sync.LocalSGD:
        outer = sync.DiLoCo(0.7, 0.9) if self.outer else None
        return sync.LocalSGD(EVERY, overlap=self.overlap, optimizer_state=self.state, outer=outer)

    def model(self) -> nn.Module:
        if not self.with_batch_norm:
            return mlp(dtype=torch.float64)
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()

    def optimizer(self, model: nn.Module) -> SGD:
        return SGD(model.parameters(), lr=0.1, momentum=0.9)

    def dataset(self) -> TensorDataset:
        x, y = data(self.length).tensors
        return TensorDataset(x.double(), y)

    def run(self, **settings: Any) -> pl.Run:
        model = self.model()
        given = {"batch": BATCH, "balance": Skewed(), "sync": self.role(), "deadline": 10.0, **settings}
        return pl.Run(model, self.optimizer(model), self.dataset(), **given)


@dataclass(frozen=True)
class Case:
    """How long a run is, and who ends it early: ``leavers`` break at a step and phase, ``stops`` calls run.stop()."""

    steps: int = ENDS
    leavers: Mapping[int, tuple[int, str]] | None = None
    stops: tuple[int, int] | None = None
    """Rank and step."""


Outcome = tuple[tuple[int, int], Tensor]


def values(model: nn.Module) -> Tensor:
    """Parameters and floating-point buffers."""
    buffers = [b.reshape(-1).clone() for b in model.buffers() if b.is_floating_point()]
    return torch.cat([flat(model), *buffers])


def digest(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def ended(recipe: Recipe, cases: Sequence[Case]) -> list[Outcome]:
    """Progress and model at the end of each case."""
    return [_ended(recipe, case) for case in cases]


def _ended(recipe: Recipe, case: Case) -> Outcome:
    with recipe.run() as run:
        last, phase = (case.leavers or {}).get(run.fleet.rank, (-1, ""))
        try:
            for step in run.steps(steps=case.steps):
                if case.stops == (run.fleet.rank, step.index):
                    run.stop()
                run.optimizer.zero_grad()
                for x, y in step:
                    step.backward(F.cross_entropy(run.model(x), y))
                if (step.index, BEFORE) == (last, phase):
                    break
                run.optimizer.step()
                if (step.index, AFTER) == (last, phase):
                    break
        except pl.PacelineError as error:
            error.add_note(repr(case))
            raise
        return (run.progress.step, run.progress.examples), values(run.model)


class Simulated:
    """All workers in one process: at the end of a round an average sets off, and arrives some steps later."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.models = [recipe.model() for _ in range(WORKERS)]
        self.optimizers = [recipe.optimizer(model) for model in self.models]
        self.anchor = copy.deepcopy(self.models[0])
        self.outer = SGD(self.anchor.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.used, self.total = [0] * WORKERS, [0] * WORKERS
        self.flight: tuple[list[Tensor], Tensor, bool] | None = None
        self.examples = 0

    def step(self, number: int, who: Sequence[int]) -> None:
        length = self.recipe.length
        epoch, at = divmod(number, -(-length // BATCH))
        order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch))
        ids = order[at * BATCH : (at + 1) * BATCH]
        self.examples += len(ids)
        x, y = self.recipe.dataset().tensors
        for rank, part in enumerate(torch.split(ids, list(Skewed().split(len(ids), WORKERS)))):
            if len(part) and rank in who:
                self.optimizers[rank].zero_grad()
                F.cross_entropy(self.models[rank](x[part]), y[part]).backward()  # type: ignore[no-untyped-call]
                self.optimizers[rank].step()
                self.used[rank] += len(part)
                self.total[rank] += len(part)

    def set_off(self, stop: bool) -> None:
        if sum(self.used) == 0:  # nobody has done anything: nothing to average, nothing for an outer optimizer
            return
        own = [flat(model) for model in self.models]
        self.flight = own, mean(own, self.used), stop
        self.used = [0] * WORKERS

    @torch.no_grad()
    def land(self) -> bool:
        """Apply what is under way; whether somebody asks to stop."""
        if self.flight is None:
            return False
        (own, new, stop), self.flight = self.flight, None
        if self.recipe.outer:
            for parameter, value in zip(self.anchor.parameters(), unflat(new, self.anchor), strict=True):
                parameter.grad = parameter.detach() - value
            self.outer.step()
            new = flat(self.anchor)
        for model, start in zip(self.models, own, strict=True):
            for parameter, change in zip(model.parameters(), unflat(new - start, model), strict=True):
                parameter.add_(change)
        if isinstance(self.recipe.state, sync.Reset):
            self.optimizers = [self.recipe.optimizer(model) for model in self.models]
        return stop

    def finish(self) -> Tensor:
        return mean([values(model) for model in self.models], self.total)


def mean(each: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    return sum(n / sum(weights) * one for n, one in zip(weights, each, strict=True))  # type: ignore[return-value]


def unflat(vector: Tensor, model: nn.Module) -> list[Tensor]:
    parts = torch.split(vector, [p.numel() for p in model.parameters()])
    return [part.view_as(p) for part, p in zip(parts, model.parameters(), strict=True)]


def simulated(recipe: Recipe, case: Case) -> Outcome:
    """Who has left does nothing more, and is heard of when the average lands in which it took part; then all end."""
    fleet, leavers = Simulated(recipe), case.leavers or {}
    done = in_round = 0
    wish = False
    while done < case.steps:
        who = [r for r in range(WORKERS) if r not in leavers or done < leavers[r][0] + (leavers[r][1] == AFTER)]
        if not who:
            fleet.land()
            fleet.set_off(True)
            break
        fleet.step(done, who)
        wish = wish or (case.stops is not None and case.stops[1] == done)
        done, in_round = done + 1, in_round + 1
        last = done == case.steps
        over = last or in_round == EVERY
        if over or in_round >= recipe.overlap:
            last = fleet.land() or last
        if over or last:
            fleet.set_off(wish or len(who) < WORKERS)
            in_round, wish = 0, False
        if last:
            break
    fleet.land()
    if done == 0:
        return (0, 0), values(fleet.models[0])
    return (done, fleet.examples), fleet.finish()


def check(pool: Pool, recipe: Recipe, cases: Sequence[Case]) -> None:
    """All workers have the same bits and progress at the end, and those that a simulation has."""
    found = pool.run(WORKERS, ended, recipe, cases)
    for case, *outcomes in zip(cases, *found, strict=True):
        assert len({(progress, digest(model)) for progress, model in outcomes}) == 1, case
        progress, model = outcomes[0]
        expected_progress, expected = simulated(recipe, case)
        assert progress == expected_progress, case
        # Double precision: sums in another order.
        assert float((model - expected).abs().max()) < 1e-12, case


OVERLAPS = [1, 2, EVERY]


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("state", [sync.Keep(), sync.Reset()], ids=["keep", "reset"])
@pytest.mark.parametrize("outer", [False, True], ids=["plain", "outer"])
def test_it_is_what_one_would_simulate(pool: Pool, overlap: int, state: Any, outer: bool) -> None:
    """Three epochs of six steps: ragged steps without examples for rank 0, and a last round that is not full."""
    check(pool, Recipe(overlap, state, outer), [Case(steps=18)])


def test_a_longer_overlap_ends_with_the_next_round(pool: Pool) -> None:
    found = pool.run(WORKERS, ended, Recipe(EVERY + 3), [Case()])
    expected = pool.run(WORKERS, ended, Recipe(EVERY), [Case()])
    assert torch.equal(found[0][0][1], expected[0][0][1])


def test_training_goes_on_while_the_average_is_under_way(pool: Pool) -> None:
    """It is another algorithm than without overlap, and another for each: the law above is not about the same run."""
    ends = [pool.run(WORKERS, ended, Recipe(overlap), [Case()])[0][0][1] for overlap in (0, *OVERLAPS)]
    assert all(float((one - other).abs().max()) > 1e-6 for one, other in pairwise(ends))


@pytest.mark.parametrize(("overlap", "outer"), [(1, False), (2, True), (EVERY, False)])
def test_the_loop_may_end_at_any_phase_of_a_round(pool: Pool, overlap: int, outer: bool) -> None:
    check(pool, Recipe(overlap, outer=outer, with_batch_norm=True), [Case(steps=steps) for steps in range(1, 10)])


@pytest.mark.parametrize("overlap", [2, EVERY])
def test_one_worker_may_ask_to_stop_at_any_step(pool: Pool, overlap: int) -> None:
    """All end when that is known to all: when the average of the round lands."""
    cases = [Case(stops=(step % WORKERS, step)) for step in range(10)]
    check(pool, Recipe(overlap, with_batch_norm=True), cases)


@pytest.mark.parametrize(("overlap", "phase"), [(1, BEFORE), (2, BEFORE), (2, AFTER), (EVERY, AFTER)])
def test_one_worker_may_leave_at_any_step(pool: Pool, overlap: int, phase: str) -> None:
    cases = [Case(leavers={step % WORKERS: (step, phase)}) for step in range(11)]
    check(pool, Recipe(overlap), cases)


@pytest.mark.parametrize(("outer", "phase"), [(False, BEFORE), (True, AFTER)], ids=["plain", "outer"])
def test_all_may_leave_together(pool: Pool, outer: bool, phase: str) -> None:
    """Also just after an average: one of nothing changes nothing, not even by an outer optimizer's momentum."""
    cases = [Case(leavers=dict.fromkeys(range(WORKERS), (step, phase))) for step in range(11)]
    check(pool, Recipe(2, outer=outer), cases)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_several_may_leave_at_steps_of_their_own(pool: Pool, overlap: int) -> None:
    draw = random.Random(overlap)

    def somewhere() -> tuple[int, str]:
        return draw.randrange(10), draw.choice([BEFORE, AFTER])

    cases = [Case(leavers={rank: somewhere() for rank in draw.sample(range(WORKERS), 2)}) for _ in range(6)]
    cases += [Case(leavers={rank: somewhere() for rank in range(WORKERS)}) for _ in range(4)]
    check(pool, Recipe(overlap), cases)


def leaves_while_a_save_is_due(folder: Path, at: int) -> Outcome:
    """Saves are due in every round, and bring all together when its average lands; rank 0 leaves about then."""
    recipe = Recipe(2)
    with recipe.run(checkpoint=pl.Checkpoint(folder, every=1), deadline=3.0) as run:
        for step in run.steps(steps=ENDS):
            run.optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(run.model(x), y))
            run.optimizer.step()
            if step.index == at and run.fleet.rank == 0:
                break
        return (run.progress.step, run.progress.examples), values(run.model)


@pytest.mark.parametrize("at", [2, 3, 4, 5])
def test_a_worker_may_leave_while_a_save_is_due(pool: Pool, tmp_path: Path, at: int) -> None:
    (progress, model), *others = pool.run(WORKERS, leaves_while_a_save_is_due, tmp_path, at)
    assert progress[0] > at
    for theirs, their_model in others:
        assert theirs == progress
        assert torch.equal(their_model, model)


SAVES = range(1, 10)


def saved(recipe: Recipe, folder: Path, saves: Sequence[int]) -> Tensor:
    """The model at the end of a run that saves after these steps."""
    with recipe.run() as run:

        def save(step: pl.Step) -> None:
            if step.index + 1 in saves:
                run.save(folder / f"{step.index + 1}.ckpt")

        train(run, run.model, each=save, steps=ENDS)
        return values(run.model)


def resumed(recipe: Recipe, folder: Path, saves: Sequence[int]) -> list[Tensor]:
    """The models at the end of the runs that go on from there."""
    ends = []
    for at in saves:
        with recipe.run() as run:
            assert run.resume(folder / f"{at}.ckpt")
            assert run.progress.step == at
            train(run, run.model, steps=ENDS)
            ends.append(values(run.model))
    return ends


def resumed_in_the_same_run(recipe: Recipe, folder: Path, saves: Sequence[int]) -> list[Tensor]:
    """As above, but one run goes back again and again."""
    with recipe.run() as run:
        ends = []
        for at in saves:
            run.resume(folder / f"{at}.ckpt")
            train(run, run.model, steps=ENDS)
            ends.append(values(run.model))
        return ends


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(1, with_batch_norm=True),
        Recipe(2, outer=True, with_batch_norm=True),
        Recipe(EVERY, sync.Reset(), outer=True),
    ],
    ids=["one step", "two steps and outer", "a whole round, reset and outer"],
)
def test_resume_at_any_step_is_never_having_stopped(pool: Pool, tmp_path: Path, recipe: Recipe) -> None:
    """To the bit, with averages under way; and saving changes nothing."""
    never = {digest(end) for end in pool.run(WORKERS, saved, recipe, tmp_path, [])}
    assert len(never) == 1
    assert {digest(end) for end in pool.run(WORKERS, saved, recipe, tmp_path, SAVES)} == never
    for how in (resumed, resumed_in_the_same_run):
        for ends in pool.run(WORKERS, how, recipe, tmp_path, SAVES):
            for at, end in zip(SAVES, ends, strict=True):
                assert {digest(end)} == never, f"saved at {at}"


@dataclass(frozen=True)
class OneHasNone:
    """Rank 1 gets nothing of small batches."""

    def split(self, batch: int, workers: int) -> Sequence[int]:
        return [batch // 2, 0, batch - batch // 2] if batch < BATCH else [BATCH // 3] * 3


def had_no_examples_yet(folder: Path, resume: bool) -> Tensor:
    """The first round has small batches; a checkpoint is made when its average has just set off."""
    settings = {"batch": pl.batch.Schedule({0: 4, 4 * EVERY: BATCH}), "balance": OneHasNone()}
    with Recipe(2).run(**settings) as run:
        if resume:
            run.resume(folder / "saved.ckpt")

        def save(step: pl.Step) -> None:
            if step.index + 1 == EVERY:
                run.save(folder / "saved.ckpt")

        train(run, run.model, each=save, steps=ENDS)
        return values(run.model)


def test_resume_of_a_worker_that_had_no_examples_yet(pool: Pool, tmp_path: Path) -> None:
    """Its own model is not the average while that is under way."""
    never = pool.run(WORKERS, had_no_examples_yet, tmp_path, False)
    again = pool.run(WORKERS, had_no_examples_yet, tmp_path, True)
    assert {digest(each) for each in [*never, *again]} == {digest(never[0])}


def saved_for_others(recipe: Recipe, folder: Path) -> list[Tensor]:
    """The average of the models at each save."""
    averages = []
    with recipe.run() as run:

        def save(step: pl.Step) -> None:
            run.save(folder / f"{step.index + 1}.ckpt")
            with run.consensus():
                averages.append(flat(run.model))

        train(run, run.model, each=save, steps=8)
        return averages


def resumed_by_others(recipe: Recipe, folder: Path, saves: Sequence[int]) -> list[tuple[Tensor, Tensor, int]]:
    """The model at the beginning and at the end, and the examples in between."""
    found = []
    for at in saves:
        with recipe.run() as run:
            run.resume(folder / f"{at}.ckpt")
            begin, used = flat(run.model), run.progress.examples
            train(run, run.model, steps=ENDS)
            found.append((begin, values(run.model), run.progress.examples - used))
    return found


@pytest.mark.parametrize(("workers", "outer"), [(1, False), (2, True)])
def test_fewer_workers_go_on_from_the_average(pool: Pool, tmp_path: Path, workers: int, outer: bool) -> None:
    """Saved with and without an average under way, in the middle and at the end of a round."""
    recipe, saves = Recipe(2, outer=outer, with_batch_norm=True), [3, 4, 5, 8]
    averages = pool.run(WORKERS, saved_for_others, recipe, tmp_path)[0]
    found = pool.run(workers, resumed_by_others, recipe, tmp_path, saves)
    for at, *outcomes in zip(saves, *found, strict=True):
        for begin, end, examples in outcomes:
            assert torch.equal(begin, averages[at - 1]), f"saved at {at}"
            assert digest(end) == digest(outcomes[0][1])
            assert examples == (ENDS - at) * BATCH


def looked_at(recipe: Recipe) -> tuple[list[tuple[Tensor, Tensor, Tensor, bool]], Tensor, Tensor]:
    """Before, inside of and after a consensus in each step, and whether an average was under way; then the end."""
    looks, used = [], []
    with recipe.run() as run:

        def look(step: pl.Step) -> None:
            used.append(step.plan.counts[run.fleet.rank])
            before = values(run.model)
            with run.consensus():
                inside = values(run.model)
            looks.append((before, inside, values(run.model), step.index % EVERY == EVERY - 1))

        train(run, run.model, each=look, steps=ENDS)
        return looks, torch.tensor(used), values(run.model)


@pytest.mark.parametrize("overlap", [2, EVERY])
def test_consensus_while_an_average_is_under_way(pool: Pool, overlap: int) -> None:
    """The average of the models as they are, by all examples used so far; then back to the bit, and no harm done."""
    recipe = Recipe(overlap, with_batch_norm=True)
    found = pool.run(WORKERS, looked_at, recipe)
    never = pool.run(WORKERS, saved, recipe, Path(), [])
    assert {digest(end) for _, _, end in found} == {digest(never[0])}
    for index, each in enumerate(zip(*(looks for looks, _, _ in found), strict=True)):
        befores, insides, afters, under_way = zip(*each, strict=True)
        assert [digest(one) for one in befores] == [digest(one) for one in afters]
        assert len({digest(one) for one in insides}) == 1
        if under_way[0] and index < ENDS - 1:
            assert len({digest(one) for one in befores}) == WORKERS
            used = [int(counts[: index + 1].sum()) for _, counts, _ in found]
            torch.testing.assert_close(insides[0], mean(befores, used), rtol=0, atol=1e-12)


def test_one_process_is_plain_training() -> None:
    with Recipe(2).run(balance=pl.balance.Even()) as overlapped, Recipe(0).run(balance=pl.balance.Even()) as plain:
        for run in (overlapped, plain):
            train(run, run.model, steps=ENDS)
        torch.testing.assert_close(flat(overlapped.model), flat(plain.model), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"every": 4, "overlap": -1}, r"overlap \(-1\) must be a whole number of steps, or 0 for none"),
        ({"every": 4, "overlap": 1.5}, r"overlap \(1\.5\) must be a whole number of steps, or 0 for none"),
        (
            {"every": sync.Seconds(1.0), "overlap": 1},
            r"cannot overlap rounds that are measured by the clock: .* use rounds of steps or examples, or overlap=0",
        ),
        ({"every": sync.PostLocal(3, sync.Seconds(1.0)), "overlap": 1}, "cannot overlap rounds that are measured by"),
        (
            {"every": 4, "overlap": 1, "optimizer_state": sync.Average()},
            r"averages optimizer state at once and in full precision only .* use Keep\(\) or Reset\(\) with a codec or",
        ),
    ],
)
def test_what_cannot_overlap(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(pl.SettingError, match=says):
        sync.LocalSGD(**settings)
