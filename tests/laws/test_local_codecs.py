"""Averages of models that travel encoded: the same bits on all workers, errors as small as the codec promises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import paceline as pl
from paceline import codec, sync
from paceline.roles import Codec
from tests.laws.test_local_sgd import BATCH, Skewed
from tests.pool import Pool
from tests.problems import data, flat, train

WORKERS = 3
EVERY = 4
ENDS = 18  # four rounds and a half, three epochs of 61 examples with ragged ends

CODECS: list[Codec] = [codec.Half(), codec.BFloat16(), codec.Uniform8()]
NAMES = ["half", "bfloat16", "uniform8"]


@dataclass(frozen=True)
class Recipe:
    codec: Codec | None
    overlap: int = 0
    outer: bool = False
    momentum: float = 0.9
    with_batch_norm: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        if self.with_batch_norm:
            return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        return nn.Linear(6, 3).double()

    def run(self, model: nn.Module, optimizer: SGD, **settings: Any) -> pl.Run:
        x, y = data(60 if self.with_batch_norm else 61).tensors  # BatchNorm refuses shares of one example
        outer = sync.DiLoCo(0.7, 0.9) if self.outer else None
        role = sync.LocalSGD(EVERY, codec=self.codec, overlap=self.overlap, outer=outer)
        given: dict[str, Any] = {"batch": BATCH, "balance": Skewed(), "deadline": 10.0, **settings}
        return pl.Run(model, optimizer, TensorDataset(x.double(), y), sync=role, **given)

    def open(self) -> pl.Run:
        model = self.model()
        return self.run(model, SGD(model.parameters(), lr=0.1, momentum=self.momentum))


def values(model: nn.Module) -> Tensor:
    """Parameters and floating-point buffers."""
    return torch.cat([flat(model), *(b.reshape(-1).clone() for b in model.buffers() if b.is_floating_point())])


def digest(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def ended(recipe: Recipe, ends: Sequence[int]) -> list[Tensor]:
    """The models at the end of loops of so many steps."""
    found = []
    for steps in ends:
        with recipe.open() as run:
            train(run, run.model, steps=steps)
            found.append(values(run.model))
    return found


@pytest.mark.parametrize("one", CODECS, ids=NAMES)
@pytest.mark.parametrize(("overlap", "outer"), [(0, False), (2, True)], ids=["at once", "overlap and outer"])
def test_all_workers_have_the_same_bits(pool: Pool, one: Codec, overlap: int, outer: bool) -> None:
    """At every phase of a round; and the codec is in use: the bits are others than without."""
    ends = [4, 7]
    found = pool.run(WORKERS, ended, Recipe(one, overlap, outer, with_batch_norm=True), ends)
    plain = pool.run(WORKERS, ended, Recipe(None, overlap, outer, with_batch_norm=True), ends)
    for steps, *models in zip(ends, *found, strict=True):
        assert len({digest(model) for model in models}) == 1, steps
    for coded, uncoded in zip(found[0], plain[0], strict=True):
        assert digest(coded) != digest(uncoded)


@dataclass
class Round:
    own: Tensor
    """A worker's parameters before the average."""
    used: int
    after: Tensor
    """And after it."""


def rounds(recipe: Recipe, steps: int = ENDS) -> list[Round]:
    """A run with plain SGD on a convex loss, with steps so small that they bring no two models further apart.

    The loss of an example is softmax regression with (x, 1) as input. The Hessian of log-sum-exp is at most 1/2, so
    that of the loss is at most (|x|^2 + 1) / 2; a step below twice the inverse of that does not expand.
    """
    x, _ = data(61).tensors
    model = recipe.model()
    optimizer = SGD(model.parameters(), lr=2.0 / (float(x.square().sum(1).max()) + 1.0))
    own: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: own.append(flat(model)))  # before the run's, which averages
    found, used = [], 0
    with recipe.run(model, optimizer) as run:

        def look(step: pl.Step) -> None:
            nonlocal used
            used += step.plan.counts[run.fleet.rank]
            if step.round is not None:
                found.append(Round(own[-1], used, flat(model)))
                used = 0

        train(run, model, each=look, steps=steps)
    return found


@dataclass
class Average:
    mean: Tensor
    """As it should be."""
    after: Tensor
    """As it has become."""
    change: Tensor
    """The largest change of a worker in the round, number by number."""

    @property
    def error(self) -> Tensor:
        return self.after - self.mean


def averages(found: Sequence[Sequence[Round]]) -> list[Average]:
    start = flat(Recipe(None).model())
    out = []
    for each in zip(*found, strict=True):
        total = sum(one.used for one in each)
        mean = sum(one.used / total * one.own for one in each)
        change = torch.stack([(one.own - start).abs() for one in each if one.used]).amax(0)
        out.append(Average(mean, each[0].after, change))
        start = each[0].after
    return out


@pytest.mark.parametrize(("one", "precision"), [(codec.Half(), 2.0**-11), (codec.BFloat16(), 2.0**-8)], ids=NAMES[:2])
def test_what_half_precision_loses(pool: Pool, one: Codec, precision: float) -> None:
    """Changes p_i d_i are rounded on the way to who adds, and their sum on the way back.

    With sum_i p_i = 1 that is at most precision * max_i |d_i| each time, for each number. Added to that are the
    smallest numbers of float16 (2^-25 for each rounding) and float32 sums, which 1 % more allows for.
    """
    found = averages(pool.run(WORKERS, rounds, Recipe(one)))
    assert len(found) == 5
    for each in found:
        bound = 2.02 * precision * each.change + (WORKERS + 1) * 2.0**-25
        assert (each.error.abs() <= bound).all()
        assert each.error.abs().max() > 0


def test_what_eight_bits_lose_does_not_add_up(pool: Pool) -> None:
    """The errors of all rounds together are what is kept for the next time: no more after many rounds than after one.

    With D the largest change of a round, what worker i keeps is at most (p_i D + what it kept) / 254, thus all
    together D / 253; and as much once more of the sum, which has D (1 + 2 / 253) at most.
    """
    found = averages(pool.run(WORKERS, rounds, Recipe(codec.Uniform8()), 60 * EVERY))
    largest = max(float(each.change.max()) for each in found)
    errors = torch.stack([each.error for each in found])
    assert errors[0].abs().max() > 1e-4 * largest
    bound = 2.02 * largest / 253
    assert errors.cumsum(0).abs().max() <= bound
    assert errors.abs().sum(0).max() > 3 * bound  # they would have added up to more


@pytest.mark.parametrize("one", CODECS, ids=NAMES)
def test_a_coded_run_stays_close_to_the_plain_one(pool: Pool, one: Codec) -> None:
    """Steps and averages bring no two models further apart, so the distance at the end is at most the sum of errors."""
    coded = averages(pool.run(WORKERS, rounds, Recipe(one)))
    plain = averages(pool.run(WORKERS, rounds, Recipe(None)))
    errors = sum(float(each.error.norm()) for each in coded)
    distance = float((coded[-1].after - plain[-1].after).norm())
    assert 0 < distance <= errors + 1e-12
    moved = float((plain[-1].after - flat(Recipe(None).model())).norm())
    assert errors < 0.05 * moved  # the bound says something


STEPS = 11


def saved(recipe: Recipe, folder: Path, saves: Sequence[int]) -> Tensor:
    with recipe.open() as run:

        def save(step: pl.Step) -> None:
            if step.index + 1 in saves:
                run.save(folder / f"{step.index + 1}.ckpt")

        train(run, run.model, each=save, steps=STEPS)
        return values(run.model)


def resumed(recipe: Recipe, folder: Path, saves: Sequence[int]) -> list[Tensor]:
    ends = []
    for at in saves:
        with recipe.open() as run:
            assert run.resume(folder / f"{at}.ckpt")
            train(run, run.model, steps=STEPS)
            ends.append(values(run.model))
    return ends


def resumed_in_the_same_run(recipe: Recipe, folder: Path, saves: Sequence[int]) -> list[Tensor]:
    """One run goes back again and again: what it kept for the next average is not of that past."""
    ends = []
    with recipe.open() as run:
        for at in saves:
            run.resume(folder / f"{at}.ckpt")
            train(run, run.model, steps=STEPS)
            ends.append(values(run.model))
    return ends


@pytest.mark.parametrize(
    ("recipe", "saves"),
    [
        (Recipe(codec.Half(), with_batch_norm=True), [2, 6]),
        (Recipe(codec.Uniform8()), range(1, 10)),
        (Recipe(codec.Uniform8(), 2, outer=True, with_batch_norm=True), range(1, 10)),
    ],
    ids=["half", "uniform8", "uniform8 with overlap and outer"],
)
def test_resume_at_any_step_is_never_having_stopped(
    pool: Pool, tmp_path: Path, recipe: Recipe, saves: Sequence[int]
) -> None:
    """To the bit: what the codec has still to make up for is saved, too. And saving changes nothing."""
    never = {digest(end) for end in pool.run(WORKERS, saved, recipe, tmp_path, [])}
    assert len(never) == 1
    assert {digest(end) for end in pool.run(WORKERS, saved, recipe, tmp_path, saves)} == never
    for how in (resumed, resumed_in_the_same_run):
        for ends in pool.run(WORKERS, how, recipe, tmp_path, saves):
            for at, end in zip(saves, ends, strict=True):
                assert {digest(end)} == never, f"saved at {at}"


def went_back(folder: Path) -> tuple[Tensor, Tensor]:
    """Resume what more workers have saved, in a new run and in one that has trained before."""
    recipe = Recipe(codec.Uniform8())
    ends = []
    for before in (0, 6):
        with recipe.open() as run:
            if before:
                train(run, run.model, steps=before)
            run.resume(folder / "6.ckpt")
            run.optimizer.state.clear()
            train(run, run.model, steps=STEPS)
            ends.append(values(run.model))
    return ends[0], ends[1]


def test_fewer_workers_go_on_with_nothing_to_make_up_for(pool: Pool, tmp_path: Path) -> None:
    """What was lost was lost in slices of another number of workers, or in a past that is no more."""
    pool.run(WORKERS, saved, Recipe(codec.Uniform8()), tmp_path, [6])
    found = pool.run(2, went_back, tmp_path)
    assert len({digest(end) for ends in found for end in ends}) == 1


def frozen(recipe: Recipe) -> tuple[Tensor, bool]:
    """A layer is frozen when a round has ended."""
    with recipe.open() as run:
        weight = run.replica.parameters[0]
        kept = torch.empty(0)

        def freeze(step: pl.Step) -> None:
            nonlocal kept
            if step.index == 2 * EVERY - 1:
                weight.requires_grad_(False)
                kept = weight.detach().clone()

        train(run, run.model, each=freeze, steps=ENDS)
        return values(run.model), torch.equal(kept, weight)


def test_parameters_may_be_frozen_between_rounds(pool: Pool) -> None:
    found = pool.run(WORKERS, frozen, Recipe(None))
    assert len({digest(end) for end, _ in found}) == 1
    assert all(kept for _, kept in found)


def refuses_to_freeze() -> str:
    with pytest.raises(pl.PacelineError) as caught:
        frozen(Recipe(codec.Uniform8()))
    return str(caught.value)


def test_with_a_codec_they_may_not(pool: Pool) -> None:
    """The change of each parameter since the round began is not known then."""
    assert any("freeze or thaw parameters in a new Run" in told for told in pool.run(WORKERS, refuses_to_freeze))


def sent(recipe: Recipe) -> list[int]:
    counts: list[int] = []
    x, y = data(61, 1000).tensors
    model = nn.Linear(1000, 3)
    optimizer = SGD(model.parameters(), lr=0.01)
    role = sync.LocalSGD(EVERY, codec=recipe.codec, overlap=recipe.overlap)
    with pl.Run(model, optimizer, TensorDataset(x, y), batch=BATCH, sync=role, deadline=10.0) as run:
        train(run, model, each=lambda step: counts.append(run.sync.bytes_sent), steps=8)
    return counts


@pytest.mark.parametrize(("one", "part"), [(codec.Half(), 0.5), (codec.BFloat16(), 0.5), (codec.Uniform8(), 0.26)])
def test_fewer_bytes(pool: Pool, one: Codec, part: float) -> None:
    """Half of them with 16 bits, a quarter with 8; notes and sketches for the drift come to it, 7 kB here."""
    plain, coded = pool.run(WORKERS, sent, Recipe(None))[0], pool.run(WORKERS, sent, Recipe(one))[0]
    body = plain[EVERY - 1] - coded[EVERY - 1]
    model = 4 * 3003 * 2 * (WORKERS - 1) / WORKERS
    assert math.isclose(body, (1 - part) * model, rel_tol=0.1)
    assert [count > 0 for count in coded] == [False] * 3 + [True] + [False] * 3 + [True]


@pytest.mark.parametrize("one", CODECS, ids=NAMES)
def test_optimizer_state_is_not_encoded(one: Codec) -> None:
    says = r"in full precision only \(second moments must not become negative\), not with codec=.*; use Keep\(\) or"
    with pytest.raises(pl.SettingError, match=says):
        sync.LocalSGD(EVERY, codec=one, optimizer_state=sync.Average())
    sync.LocalSGD(EVERY, codec=codec.Identity(), optimizer_state=sync.Average())
