"""Adaptive batches in real runs: the same decisions for every split, and exact resume in the middle of growth."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline as pl
from paceline import batch, sync
from paceline.events import Event, Remark
from paceline.probe import Example
from paceline.records import Progress, Round
from paceline.roles import Sync
from tests.pool import Pool, RemoteError
from tests.problems import data, flat, mlp, train

LENGTH = 600


def noisy() -> TensorDataset:
    x, y = data(LENGTH).tensors
    generator = torch.Generator().manual_seed(1)
    wrong = torch.rand(LENGTH, generator=generator) < 0.3
    return TensorDataset(x.double(), torch.where(wrong, torch.randint(3, (LENGTH,), generator=generator), y))


POLICIES: dict[str, Callable[[], Any]] = {
    "norm": lambda: batch.NormTest(start=16, limit=256, eta=0.6, multiple=16),
    # As published, but for whole quarters: of 17 examples four workers and four micro-batches make other units.
    "published": lambda: batch.NormTest(start=16, limit=256, eta=0.6, growth=math.inf, smoothing=0.0, multiple=16),
    "inner product": lambda: batch.InnerProductTest(start=16, limit=256, theta=0.2, multiple=16),
    "augmented": lambda: batch.AugmentedTest(start=16, limit=256, theta=0.3, nu=0.8, multiple=16),
    "tensors": lambda: batch.CoordinateTest(start=16, limit=256, eta=0.7, every=3, multiple=16),
    "coordinates": lambda: batch.CoordinateTest(
        start=16, limit=256, eta=0.9, every=3, per_tensor=False, quantile=0.5, multiple=16
    ),
}


def sizes_of(
    kind: str, micro: int | None, exact: bool, wrap: bool = False, steps: int = 25
) -> tuple[list[int], Tensor]:
    """The batches of a run, and its parameters."""
    model: nn.Module = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[int] = []
    probe = pl.Probe(exact=exact)
    policy = POLICIES[kind]()
    run = pl.Run(model, optimizer, noisy(), batch=policy, micro=micro, probe=probe, lr=pl.lr.AdaScale(base=16))
    module: nn.Module = model
    if wrap:
        run.close()
        module = DistributedDataParallel(model)
        run = pl.Run(module, optimizer, noisy(), batch=policy, micro=micro, probe=probe, lr=pl.lr.AdaScale(base=16))
    with run:
        train(run, module, steps=steps, each=lambda step: found.append(step.plan.batch))
        return found, flat(model)


@pytest.mark.parametrize("kind", list(POLICIES))
def test_the_same_decisions_for_four_workers_and_for_four_micro_batches(pool: Pool, kind: str) -> None:
    # In exact arithmetic the statistics are the same; sums in another order differ in the last bits of a double.
    (alone,) = pool.run(1, sizes_of_quarters, kind)
    many = pool.run(4, sizes_of, kind, None, True)
    assert max(alone[0]) > 16
    for sizes, parameters in many:
        assert sizes == alone[0]
        torch.testing.assert_close(parameters, alone[1], rtol=0, atol=1e-12)


def sizes_of_quarters(kind: str) -> tuple[list[int], Tensor]:
    """One worker, four micro-batches in every step, however large it is."""
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[int] = []
    rule = pl.lr.AdaScale(base=16)
    with pl.Run(model, optimizer, noisy(), batch=POLICIES[kind](), micro=4, probe=pl.Probe(exact=True), lr=rule) as run:
        plan = run._loop.plan

        def in_four(cursor: Any, goal: Any) -> Any:
            # A micro-batch is a quarter of the step: what four workers have.
            run.micro = None
            whole = plan(cursor, goal)
            run.micro = -(-whole.batch // 4)
            return plan(cursor, goal)

        run._loop.plan = in_four  # type: ignore[method-assign]
        train(run, model, steps=25, each=lambda step: found.append(step.plan.batch))
        return found, flat(model)


def test_wrapped_in_ddp(pool: Pool) -> None:
    for kind in ("norm", "augmented", "tensors"):
        plain = pool.run(2, sizes_of, kind, 8, True)
        wrapped = pool.run(2, sizes_of, kind, 8, True, True)
        assert wrapped[0][0] == wrapped[1][0] == plain[0][0]
        assert max(plain[0][0]) > 16
        torch.testing.assert_close(wrapped[0][1], plain[0][1], rtol=0, atol=1e-12)


def by_example(step_index: int) -> dict[str, float]:
    """The statistics of one step by brute force: the gradient of every example by itself."""
    model = mlp(dtype=torch.float64)
    x, y = noisy().tensors
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    ids = order[step_index * 32 : (step_index + 1) * 32]
    rows = []
    for at in ids.tolist():
        model.zero_grad()
        F.cross_entropy(model(x[at : at + 1]), y[at : at + 1]).backward()  # type: ignore[no-untyped-call]
        rows.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))  # type: ignore[union-attr]
    gradients = torch.stack(rows)
    mean = gradients.mean(0)
    products = gradients @ mean
    return {
        "variance": float(gradients.var(0, correction=1).sum()),
        "mean_sqnorm": float(mean @ mean),
        "along": float(products.var(correction=1) / (mean @ mean)),
        "coordinate": float(gradients.var(0, correction=1).square().sum()),
    }


def measured(workers_use: str) -> dict[str, float]:
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found: dict[str, float] = {}

    def loss(module: Any, batch: Any) -> Tensor:
        return F.cross_entropy(module(batch[0]), batch[1])

    class Everything(batch.CoordinateTest):
        needs = batch.CoordinateTest.needs | batch.AugmentedTest.needs

    policy = Everything(start=32, limit=64, eta=0.5, every=1)
    probe = pl.Probe(unit=Example(loss), exact=workers_use == "exact")
    with pl.Run(model, optimizer, noisy(), batch=policy, probe=probe) as run:
        for step in run.steps(steps=1):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            assert step.round is not None
            stats, coordinates = step.round.stats, step.round.coordinates
            assert stats is not None
            assert coordinates is not None
            assert stats.along is not None
            found = {"variance": stats.variance, "mean_sqnorm": stats.mean_sqnorm, "along": stats.along}
            found["coordinate"] = sum(float(each.square().sum()) for each in coordinates.variances)
    return found


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_statistics_equal_brute_force_with_per_example_gradients(pool: Pool, workers: int) -> None:
    expected = by_example(0)
    for found in pool.run(workers, measured, "exact"):
        assert found == pytest.approx(expected, rel=1e-9)


def local_stats(measuring: sync.Measuring, exact: bool, overlap: int, micro: int | None) -> list[tuple[float, float]]:
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[tuple[float, float]] = []
    role = sync.LocalSGD(3, measuring=measuring, overlap=overlap)
    with pl.Run(
        model, optimizer, noisy(), batch=48, sync=role, micro=micro, probe=pl.Probe(always=True, exact=exact)
    ) as run:

        def see(step: pl.Step) -> None:
            if step.round is not None and step.round.stats is not None:
                found.append((step.round.stats.variance, step.round.stats.mean_sqnorm))

        train(run, model, steps=9, each=see)
    return found


def local_by_hand(size: int, at_step: int, pieces: int) -> list[tuple[float, float]]:
    """Three rounds of three steps; the gradients of one step of each are compared."""
    x, y = noisy().tensors
    models = [mlp(dtype=torch.float64) for _ in range(size)]
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))
    found = []
    for step in range(9):
        rows = []
        parts = torch.split(order[step * 48 : (step + 1) * 48], 48 // size)
        for model, ids in zip(models, parts, strict=True):
            for piece in ids.chunk(pieces):
                model.zero_grad()
                F.cross_entropy(model(x[piece]), y[piece]).backward()  # type: ignore[no-untyped-call]
                rows.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))  # type: ignore[union-attr]
            own = torch.stack(rows[-pieces:]).mean(0)
            at = 0
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(own[at : at + p.numel()].view(p.shape), alpha=0.1)
                    at += p.numel()
        if step % 3 == at_step:
            units = torch.stack(rows)
            mean = units.mean(0)
            n = 48 / len(units)
            variance = n * float((units - mean).square().sum()) / (len(units) - 1)
            found.append((variance, float(mean @ mean)))
        if step % 3 == 2:
            with torch.no_grad():
                for together in zip(*(model.parameters() for model in models), strict=True):
                    average = torch.stack(list(together)).mean(0)
                    for p in together:
                        p.copy_(average)
    return found


@pytest.mark.parametrize("measuring", list(sync.Measuring))
@pytest.mark.parametrize(("workers", "pieces"), [(1, 4), (2, 1), (4, 1), (2, 3)])
def test_statistics_of_local_sgd_are_those_of_one_step_of_a_round(
    pool: Pool, measuring: sync.Measuring, workers: int, pieces: int
) -> None:
    expected = local_by_hand(workers, 0 if measuring is sync.Measuring.FIRST else 2, pieces)
    micro = 48 // workers // pieces
    for found in pool.run(workers, local_stats, measuring, True, 0, micro):
        assert len(found) == 3
        # What rides along is in the precision of the parameters: double.
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=0)
    # A sketch of 4093 numbers holds a model of 83 exactly, but for signs: so here it must agree as well.
    for found in pool.run(workers, local_stats, measuring, False, 0, micro):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=0)


def test_statistics_come_with_an_average_in_the_background_too(pool: Pool) -> None:
    first, second = pool.run(2, local_stats, sync.Measuring.FIRST, True, 1, None)
    assert first == second
    assert len(first) == 3
    # After the step in which the average of the round before may still be under way.
    assert first[0] == pytest.approx(local_by_hand(2, 1, 1)[0], rel=1e-9)


def leaves_a_measured_step(phase: str) -> tuple[Tensor, list[tuple[int, float]]]:
    """Gradients of this worker's units in the step that is measured, in which worker 1 leaves; what came of them."""
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, y = data(240).tensors
    policy = batch.NormTest(start=48, limit=480, eta=0.9)
    found: list[tuple[int, float]] = []
    units: list[Tensor] = []

    class Sees(pl.balance.Even):
        def observe(self, round: pl.Round) -> None:
            assert round.stats is not None
            found.append((round.stats.units, round.stats.variance))

    settings: dict[str, Any] = {"sync": sync.LocalSGD(3), "micro": 8, "probe": pl.Probe(exact=True), "balance": Sees()}
    with pl.Run(model, optimizer, TensorDataset(x.double(), y), batch=policy, **settings) as run:
        for step in run.steps(steps=6):
            optimizer.zero_grad()
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels))
                if step.index == 3:
                    gradients = torch.autograd.grad(F.cross_entropy(model(inputs), labels), list(model.parameters()))
                    units.append(torch.cat([each.reshape(-1) for each in gradients]))
            if run.fleet.rank == 1 and step.index == 3 and phase == "before the optimizer":
                break
            optimizer.step()
            if run.fleet.rank == 1 and step.index == 3:
                break
    return torch.stack(units), found


@pytest.mark.parametrize("phase", ["before the optimizer", "after the optimizer"])
def test_what_was_measured_in_a_step_that_does_not_count_does_not_either(pool: Pool, phase: str) -> None:
    """Nor where it is the mean of a worker's gradients: its units are not in the notes."""
    seen = pool.run(3, leaves_a_measured_step, phase)
    counting = [units for rank, (units, _) in enumerate(seen) if rank != 1 or phase == "after the optimizer"]
    variance = 8 * float(torch.cat(counting).var(0).sum())
    for _, found in seen:
        assert found[1] == (2 * len(counting), pytest.approx(variance, rel=1e-9))


def sketched_otherwise(path: str) -> list[bool]:
    """Saved in the middle of a round, after the step that is measured; resumed with sketches of another size."""
    told: list[bool] = []
    for sketch, steps in ((64, 2), (32, 6)):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = batch.NormTest(start=48, limit=480, eta=0.9)
        settings: dict[str, Any] = {"sync": sync.LocalSGD(3), "micro": 8, "probe": pl.Probe(size=sketch)}
        with pl.Run(model, optimizer, data(240), batch=policy, **settings) as run:
            if sketch == 32:
                run.resume(path)

            def each(step: pl.Step, sketch: int = sketch, run: pl.Run = run) -> None:
                if step.round is not None:
                    told.append(step.round.stats is not None)
                if sketch == 64 and step.index == 0:
                    run.save(path)

            train(run, model, each=each, steps=steps)
    return told


def test_a_round_whose_sketch_is_of_another_size_goes_without(pool: Pool, tmp_path: Path) -> None:
    for told in pool.run(2, sketched_otherwise, str(tmp_path / "saved.ckpt")):
        assert told == [True, False, True]


def local_sizes(kind: str) -> list[int]:
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[int] = []
    with pl.Run(model, optimizer, noisy(), batch=POLICIES[kind](), sync=sync.LocalSGD(4)) as run:
        # Before the round is learnt from: the size of this step, but for the end of an epoch.
        train(run, model, steps=24, each=lambda step: found.append(run.batch.size(run.progress)))
    return found


def test_local_batches_grow_between_rounds(pool: Pool) -> None:
    first, second = pool.run(2, local_sizes, "norm")
    assert first == second
    assert first[-1] > 16
    assert all(first[at] == first[at + 1] for at in range(23) if at % 4 != 3)


def fourfold(path: str, stop: int | None, resume: bool, local: bool, kind: str) -> tuple[list[Any], Tensor]:
    """Sizes, examples and parameters of a run that may stop, or go on from a checkpoint."""
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, 0.7)
    rule = pl.lr.AdaScale(base=16)
    pace = pl.lr.Pace(scheduler, lambda: rule.steps)
    found: list[Any] = []
    with pl.Run(
        model,
        optimizer,
        noisy(),
        batch=POLICIES[kind](),
        lr=rule,
        micro=4,
        sync=sync.LocalSGD(3) if local else sync.AllReduce(),
        stateful={"pace": pace},
    ) as run:
        if resume:
            run.resume(path)
        for step in run.steps(steps=20):
            optimizer.zero_grad()
            seen = []
            for x, y in step:
                seen.append(float(x.sum()))
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            pace.step()
            found.append((step.plan.batch, tuple(seen), optimizer.param_groups[0]["lr"]))
            if step.index + 1 == stop:
                run.save(path)
                break
        with run.consensus():
            return found, flat(model)


@pytest.mark.parametrize("local", [False, True], ids=["all-reduce", "local"])
@pytest.mark.parametrize("kind", ["norm", "published"])
def test_resume_in_the_middle_of_growth(pool: Pool, tmp_path: Path, local: bool, kind: str) -> None:
    whole = pool.run(2, fourfold, "", None, False, local, kind)
    sizes = [step[0] for step in whole[0][0]]
    assert len(set(sizes)) > 3
    for stop in (4, 5, 9):  # at the end of a round, and in the middle of one
        path = str(tmp_path / f"{stop}.ckpt")
        pool.run(2, fourfold, path, stop, False, local, kind)
        resumed = pool.run(2, fourfold, path, None, True, local, kind)
        for before, after in zip(whole, resumed, strict=True):
            assert after[0] == before[0][stop:]
            assert torch.equal(after[1], before[1])


@pytest.mark.parametrize("kind", ["augmented", "tensors"])
def test_resume_of_the_other_tests(pool: Pool, tmp_path: Path, kind: str) -> None:
    whole = pool.run(2, fourfold, "", None, False, False, kind)
    assert len({step[0] for step in whole[0][0]}) > 1
    path = str(tmp_path / "7.ckpt")
    pool.run(2, fourfold, path, 7, False, False, kind)
    resumed = pool.run(2, fourfold, path, None, True, False, kind)
    for before, after in zip(whole, resumed, strict=True):
        assert after[0] == before[0][7:]
        assert torch.equal(after[1], before[1])


def statistics_under(scale: float | None, clip: float | None, weight_decay: float, kind: str) -> list[float]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, weight_decay=weight_decay)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    x, y = noisy().tensors
    found: list[float] = []
    policy = POLICIES[kind]()
    with pl.Run(
        model, optimizer, TensorDataset(x.float(), y), batch=policy, micro=4, scaler=scaler, probe=pl.Probe(exact=True)
    ) as run:
        for step in run.steps(steps=6):
            optimizer.zero_grad()
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels))
            if scaler is not None:
                scaler.unscale_(optimizer)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            assert step.round is not None
            if step.round.stats is not None:
                stats = step.round.stats
                found += [stats.variance, stats.mean_sqnorm, stats.along or 0.0]
            if step.round.coordinates is not None:
                found.append(sum(float(each.sum()) for each in step.round.coordinates.variances))
    return found


@pytest.mark.parametrize("kind", ["norm", "augmented", "coordinates"])
def test_loss_scales_clipping_and_weight_decay_do_not_move_the_statistics(pool: Pool, kind: str) -> None:
    plain = pool.run(2, statistics_under, None, None, 0.0, kind)[0]
    assert len(plain) > 5
    for scale, clip, decay in ((1024.0, None, 0.0), (None, 1e-3, 0.0), (2.0**16, 1e-3, 0.1)):
        found = pool.run(2, statistics_under, scale, clip, decay, kind)[0]
        # Scales are powers of two, which single precision keeps to the bit but for what underflows.
        assert found == pytest.approx(plain, rel=1e-5)


class AllToOne(pl.balance.Even):
    """Leaves the second of two workers out after a while, as a balance by speed may."""

    rounds = 0

    def split(self, batch: int, workers: int) -> list[int]:
        return [batch, 0] if type(self).rounds > 3 else super().split(batch, workers)

    def observe(self, round: Round) -> None:
        type(self).rounds += 1


def left_alone(micro: int | None) -> tuple[list[int], list[str]]:
    """The batches, and what was remarked."""
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    AllToOne.rounds = 0
    kept, found = Remarks(), list[int]()
    policy = batch.NormTest(start=16, limit=256, eta=0.1, growth=1.2)
    with pl.Run(model, optimizer, noisy(), batch=policy, balance=AllToOne(), micro=micro, record=[kept]) as run:
        train(run, model, steps=12, each=lambda step: found.append(step.plan.batch))
    return found, kept.texts


class Remarks:
    """Keeps remarks."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def record(self, event: Event) -> None:
        if isinstance(event, Remark):
            self.texts.append(event.text)

    def close(self) -> None:
        pass


def test_a_batch_that_cannot_be_tested_any_more_is_told_of(pool: Pool) -> None:
    """With one worker left there is one unit in a step, unless micro makes more."""
    sizes, [remark] = pool.run(2, left_alone, None)[0]
    assert remark.startswith("NormTest: steps have one micro-batch of one worker")
    assert f"the batch stays {sizes[-1]}; give a micro of at most half" in remark
    assert sizes[0] < sizes[4] == sizes[-1]
    sizes, remarks = pool.run(2, left_alone, 8)[0]
    assert sizes[4] < sizes[-1]
    assert remarks == []


def overflowing() -> tuple[list[int], list[bool]]:
    """A loss scale that is too large at first: those steps are skipped, and nobody learns from them."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-110)
    x, y = noisy().tensors
    policy = POLICIES["norm"]()
    known = []
    found: list[int] = []
    with pl.Run(model, optimizer, TensorDataset(x.float() * 100, y), batch=policy, micro=4, scaler=scaler) as run:
        for step in run.steps(steps=4):
            optimizer.zero_grad()
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels) * 100)
            scaler.step(optimizer)
            scaler.update()
            found.append(step.plan.batch)
            known.append(
                step.round is not None and step.round.stats is not None and math.isfinite(step.round.stats.variance)
            )
    assert math.isfinite(policy.noise_scale) or policy.noise_scale == math.inf
    return found, known


def test_a_step_that_overflows_teaches_nothing(pool: Pool) -> None:
    sizes, known = pool.run(2, overflowing)[0]
    assert known[0] is False
    assert known[-1] is True
    assert sizes[0] == sizes[1] == 16


def refused(make: str) -> str:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    roles: dict[str, dict[str, Any]] = {
        "one unit": {"batch": batch.NormTest(start=16, limit=64, eta=0.5)},
        "one unit for a rule": {"batch": 16, "lr": pl.lr.AdaScale(base=16)},
        "directions of local models": {
            "batch": batch.AugmentedTest(start=16, limit=64),
            "sync": sync.LocalSGD(4),
            "micro": 4,
        },
        "sites": {"batch": batch.NormTest(start=16, limit=64, eta=0.5), "sync": sync.Hierarchical(2, 4), "micro": 4},
    }
    with pytest.raises(pl.SettingError) as caught:
        pl.Run(model, optimizer, data(LENGTH), **roles[make])
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        ("one unit", "micro=8"),
        ("one unit for a rule", "one micro-batch of one worker"),
        ("directions of local models", "NormTest"),
        ("sites", "under Hierarchical the workers of a site meet without the others; use sync.LocalSGD"),
    ],
)
def test_what_cannot_be_measured_is_refused(pool: Pool, make: str, words: str) -> None:
    (message,) = pool.run(1, refused, make)
    assert words in message


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: batch.NormTest(start=16, limit=64, eta=1.0), "eta .* between 0 and 1"),
        (lambda: batch.NormTest(start=16, limit=64, eta=0.0), "eta .* between 0 and 1"),
        (lambda: batch.NormTest(start=16, limit=64), "eta or noise_scales"),
        (lambda: batch.NormTest(start=16, limit=64, eta=0.5, noise_scales=2.0), "eta or noise_scales"),
        (lambda: batch.NormTest(start=16, limit=64, noise_scales=0.5, debiased=True), "above 1"),
        (lambda: batch.NormTest(start=64, limit=16, eta=0.5), "limit .* below start"),
        (lambda: batch.NormTest(start=0, limit=16, eta=0.5), "at least 1"),
        (lambda: batch.NormTest(start=16, limit=64, eta=0.5, growth=0.9), "growth .* above 1"),
        (lambda: batch.NormTest(start=16, limit=64, eta=0.5, growth=math.nan), "growth .* above 1"),
        (lambda: batch.NormTest(start=16, limit=64, eta=0.5, growth=1.5, multiple=16), "the next multiple of 16"),
        (lambda: batch.NormTest(start=20, limit=64, eta=0.5, multiple=16), "start .20. must be a multiple of 16"),
        (lambda: batch.NormTest(start=16, limit=64, eta=0.5, shrink=1.5), "shrink"),
        (lambda: batch.NormTest(start=16, limit=64, eta=0.5, smoothing=1.0), "smoothing"),
        (lambda: batch.NormTest(start=16, limit=64, eta=0.5, every=0), "every"),
        (lambda: batch.NormTest(start=16, limit=64, eta=0.5, multiple=100), "multiple of 100"),
        (lambda: batch.NormTest(start=16, limit=64, eta=0.5, population=32), "population"),
        (lambda: batch.InnerProductTest(start=16, limit=64, theta=0.0), "theta"),
        (lambda: batch.AugmentedTest(start=16, limit=64, nu=-1.0), "nu"),
        (lambda: batch.CoordinateTest(start=16, limit=64, eta=0.5, quantile=0.0), "quantile"),
        (lambda: batch.CoordinateTest(start=16, limit=64, eta=0.5, debiased=True), "no debiased form"),
        (lambda: batch.GrowthSchedule(start=16, factor=1.0, every=10, limit=64), "factor"),
        (lambda: batch.GrowthSchedule.stagewise([16, 32], [0.5, 0.6], 100), "sum 1"),
    ],
)
def test_bad_settings(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(pl.SettingError, match=words):
        make()


def recipe(name: str) -> tuple[list[int], float]:
    model = mlp()
    maker = {"adadagrad": pl.recipes.adadagrad, "adadagrad_norm": pl.recipes.adadagrad_norm}[name]
    optimizer, roles = maker(model.parameters(), lr=0.5, start=16, limit=256, eta=0.7)
    sizes: list[int] = []
    with pl.Run(model, optimizer, data(LENGTH), **roles, micro=8) as run:
        train(run, model, epochs=4, each=lambda step: sizes.append(step.plan.batch))
    x, y = data(LENGTH).tensors
    return sizes, float((model(x).argmax(1) == y).double().mean())


@pytest.mark.parametrize("name", ["adadagrad", "adadagrad_norm"])
def test_recipes_train(pool: Pool, name: str) -> None:
    (first, accuracy), (second, _) = pool.run(2, recipe, name)
    assert first == second
    assert max(first) > 16
    assert accuracy > 0.8  # a third by chance


def own_sizes(path: str, stop: int | None) -> tuple[list[tuple[int, ...]], list[int]]:
    """The shares of all steps, and the sizes of all workers at the end; rank 1's examples have wrong labels."""
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = noisy().tensors
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ["RANK"])
    if rank == 1:
        y = torch.randint(3, y.shape, generator=torch.Generator().manual_seed(5))
    own = batch.EachOwn(batch.NormTest(start=16, limit=128, eta=0.7), workers=2)
    found: list[tuple[int, ...]] = []
    with pl.Run(
        model,
        optimizer,
        TensorDataset(x, y),
        batch=own,
        balance=own,
        sync=sync.LocalSGD(3),
        micro=8,
        local_data=True,
    ) as run:
        if path and stop is None:
            run.resume(path)

        def see(step: pl.Step) -> None:
            found.append(step.plan.counts)
            if step.index + 1 == stop:
                run.save(path)

        train(run, model, steps=30, each=see)
    return found, own.sizes


def test_each_worker_its_own_batch(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, own_sizes, "", None)
    assert first == second
    counts, sizes = first
    assert counts[0] == (16, 16)
    assert counts[-1] == tuple(sizes)
    assert sizes[1] > 1.5 * sizes[0]  # whose labels are noise needs more examples
    path = str(tmp_path / "own.ckpt")
    pool.run(2, own_sizes, path, 13)
    resumed = pool.run(2, own_sizes, path, None)
    assert resumed[0] == (counts[13:], sizes)


def test_each_worker_its_own_batch_in_bad_hands() -> None:
    with pytest.raises(pl.SettingError, match="takes a NormTest"):
        batch.EachOwn(batch.Fixed(8), workers=2)  # type: ignore[arg-type]
    with pytest.raises(pl.SettingError, match="made for 2 workers"):
        batch.EachOwn(batch.NormTest(start=8, limit=16, eta=0.5), workers=2).split(16, 3)
    with pytest.raises(pl.SettingError, match=r"Measuring\.FIRST"):
        sync.LocalSGD(sync.Seconds(1.0), measuring=sync.Measuring.LAST)


def test_own_sizes_for_another_number_of_workers() -> None:
    two = batch.EachOwn(batch.NormTest(start=8, limit=64, eta=0.5), workers=2)
    for policy, size in zip(two._own, (10, 30), strict=True):
        policy._size = size
    three = batch.EachOwn(batch.NormTest(start=8, limit=64, eta=0.5), workers=3)
    three.load_state_dict(two.state_dict())
    assert three.sizes == [20, 20, 20]


def test_sizes_of_a_checkpoint_become_multiples_within_the_limit() -> None:
    policy = batch.NormTest(start=16, limit=100, eta=0.5, multiple=16)
    policy.load_state_dict({**policy.state_dict(), "size": 256})
    assert policy.size(Progress()) == 96
    two = batch.EachOwn(batch.NormTest(start=16, limit=100, eta=0.5, multiple=16), workers=2)
    for own, size in zip(two._own, (48, 64), strict=True):
        own._size = size
    three = batch.EachOwn(batch.NormTest(start=16, limit=100, eta=0.5, multiple=16), workers=3)
    three.load_state_dict(two.state_dict())
    assert three.sizes == [64, 64, 64]  # a mean of 56


def test_recipes_for_adagrad_multiply_the_gradient_by_the_gain() -> None:
    settings: dict[str, Any] = {"lr": 0.1, "start": 32, "limit": 64, "eta": 0.7}
    weights = [torch.zeros(1, requires_grad=True)]
    rules = [make(weights, **settings)[1]["lr"] for make in (pl.recipes.adadagrad, pl.recipes.adadagrad_norm)]
    assert rules == 2 * [pl.lr.AdaScale(base=32, scales=pl.lr.Scales.GRADIENT)]


def stats_with(thaw: bool, spare: bool, given: bool = False) -> tuple[float, float]:
    """Variance and squared norm of a last step, with a layer that is thawed late, or that no optimizer has, or late."""
    model = mlp(dtype=torch.float64)
    head = list(model.children())[-1]
    body = [p for p in model.parameters() if not any(p is q for q in head.parameters())]
    trained = list(head.parameters()) if spare else list(model.parameters())
    optimizer = torch.optim.SGD(trained, lr=0.0)
    for p in body:
        p.requires_grad_(not thaw)
    found = (0.0, 0.0)
    with pl.Run(model, optimizer, noisy(), batch=32, micro=4, probe=pl.Probe(always=True)) as run:

        def see(step: pl.Step) -> None:
            nonlocal found
            for p in body:
                p.requires_grad_(True)
            if given and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": body})
            assert step.round is not None
            assert step.round.stats is not None
            found = step.round.stats.variance, step.round.stats.mean_sqnorm

        train(run, model, steps=5, each=see)
    return found


def test_parameters_that_are_thawed_are_measured(pool: Pool) -> None:
    always, thawed = pool.run(2, stats_with, False, False)[0], pool.run(2, stats_with, True, False)[0]
    # Another sketch, of another length: both see 83 numbers without loss.
    assert thawed == pytest.approx(always, rel=1e-9)


def test_parameters_that_the_optimizer_gets_later_are_measured(pool: Pool) -> None:
    always, given = pool.run(2, stats_with, False, False)[0], pool.run(2, stats_with, True, True, True)[0]
    assert given == pytest.approx(always, rel=1e-9)


def left_over(local: bool) -> tuple[list[bool], list[str]]:
    """In which rounds the variance is known, where one worker's gradients of the step before are not set to zero."""
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    role = sync.LocalSGD(1) if local else sync.AllReduce()
    policy = batch.NormTest(start=32, limit=64, eta=0.5)
    known = []
    with (
        warnings.catch_warnings(record=True) as told,
        pl.Run(model, optimizer, noisy(), batch=policy, sync=role, micro=4) as run,
    ):
        warnings.simplefilter("always")
        for step in run.steps(steps=4):
            if step.index not in (1, 2) or run.fleet.rank == 0:
                optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            assert step.round is not None
            assert step.round.stats is not None
            known.append(math.isfinite(step.round.stats.variance))
    return known, [str(each.message) for each in told if ".grad" in str(each.message)]


@pytest.mark.parametrize("local", [False, True])
def test_gradients_of_before_are_no_statistics(pool: Pool, local: bool) -> None:
    (known, told), (other, warned) = pool.run(2, left_over, local)
    assert known == other == [True, False, False, True]
    assert not told
    [message] = warned
    assert "zero_grad() before the inner loop" in message


def head_alone() -> tuple[float, float]:
    model = mlp(dtype=torch.float64)
    head = list(model.children())[-1]
    for p in model.parameters():
        p.requires_grad_(any(p is q for q in head.parameters()))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.0)
    found = (0.0, 0.0)
    with pl.Run(model, optimizer, noisy(), batch=32, micro=4, probe=pl.Probe(always=True)) as run:

        def see(step: pl.Step) -> None:
            nonlocal found
            assert step.round is not None
            assert step.round.stats is not None
            found = step.round.stats.variance, step.round.stats.mean_sqnorm

        train(run, model, steps=5, each=see)
    return found


def test_gradients_that_no_optimizer_uses_do_not_count(pool: Pool) -> None:
    # Nobody sets them to zero, so that they grow from step to step.
    assert pool.run(2, stats_with, False, True)[0] == pytest.approx(pool.run(2, head_alone)[0], rel=1e-9)


def second_vectors(lr: Any) -> list[bool]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    policy = batch.CoordinateTest(start=16, limit=1024, eta=0.5, every=5)
    found: list[bool] = []
    sent: list[int] = []
    with pl.Run(model, optimizer, data(LENGTH), batch=policy, lr=lr, micro=4) as run:

        def see(step: pl.Step) -> None:
            assert step.round is not None
            found.append(step.round.coordinates is not None)
            sent.append(run.sync.bytes_sent)

        train(run, model, steps=15, each=see)
    assert [each > min(sent) for each in sent] == found  # what it costs is counted
    return found


def test_a_second_vector_travels_in_the_steps_with_a_test_alone(pool: Pool) -> None:
    for rule in (pl.lr.Constant(), pl.lr.AdaScale(base=8)):  # which asks for other things in every step
        assert pool.run(2, second_vectors, rule)[0] == [step % 5 == 4 for step in range(15)]


def counted(local: bool, skip: bool, fused: bool = False) -> tuple[float, float]:
    """Scale-invariant steps, and the sum of the factors that were applied."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    applied = 0.0

    def add(*_: Any) -> None:
        nonlocal applied
        if not getattr(optimizer, "found_inf", None):  # a fused one is called, and does nothing
            applied += optimizer.param_groups[0]["lr"]

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-110) if skip else None
    rule = pl.lr.AdaScale(base=8)
    role = sync.LocalSGD(4) if local else sync.AllReduce()
    seen = 0.0
    with pl.Run(model, optimizer, data(70), batch=32, lr=rule, sync=role, micro=8, scaler=scaler) as run:
        optimizer.register_step_pre_hook(add)  # after the run's, which has multiplied the rate by then
        for step in run.steps(epochs=4):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y) * (1e3 if skip else 0.01))
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            seen = rule.steps
    assert seen == rule.steps  # known as soon as the optimizer has stepped
    return rule.steps, applied


@pytest.mark.parametrize(
    ("local", "skip", "fused"), [(False, False, False), (True, False, False), (False, True, False), (False, True, True)]
)
def test_scale_invariant_steps_are_the_factors_that_were_applied(
    pool: Pool, local: bool, skip: bool, fused: bool
) -> None:
    for steps, applied in pool.run(2, counted, local, skip, fused):
        assert steps == pytest.approx(applied)
        assert steps > 0


def counted_apart(skips: bool) -> float:
    """Scale-invariant steps, where one worker skips a step that the other does, or leaves in the middle of a round."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if skips else None
    rule = pl.lr.AdaScale(base=8)
    run = pl.Run(model, optimizer, data(70), batch=32, lr=rule, sync=sync.LocalSGD(4), micro=8, scaler=scaler)
    with run:
        for step in run.steps(steps=11):
            optimizer.zero_grad()
            for x, y in step:
                bad = skips and step.index == 5 and run.fleet.rank == 1
                step.backward(F.cross_entropy(model(x), y) * (math.inf if bad else 1.0))
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if not skips and step.index == 5 and run.fleet.rank == 1:
                break
        assert run.progress.step == (11 if skips else 8)
        return rule.steps


@pytest.mark.parametrize("skips", [True, False], ids=["skips", "leaves"])
def test_scale_invariant_steps_are_the_same_on_all_workers(pool: Pool, skips: bool) -> None:
    first, second = pool.run(2, counted_apart, skips)
    assert first == second
    assert first >= (11 if skips else 8)


def measured_steps(limit: int, role: Sync) -> tuple[int, list[bool]]:
    """Where the batch ends, and in which steps gradients were measured."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    policy = batch.NormTest(start=16, limit=limit, eta=0.05)
    found = []
    with pl.Run(model, optimizer, data(LENGTH), batch=policy, sync=role, micro=8) as run:
        for step in run.steps(steps=8):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            assert step.round is not None
            found.append(step.round.stats is not None)
        return run.batch.size(run.progress), found


@pytest.mark.parametrize("role", [sync.AllReduce(), sync.LocalSGD(1)], ids=["all-reduce", "local"])
def test_a_batch_that_cannot_change_any_more_is_not_tested(pool: Pool, role: Sync) -> None:
    size, measured = pool.run(2, measured_steps, 64, role)[0]
    assert size == 64
    assert measured == [True] * 2 + [False] * 6


def own_refused(make: str) -> str:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = batch.EachOwn(batch.NormTest(start=16, limit=64, eta=0.5), workers=2)
    roles: dict[str, dict[str, Any]] = {
        "one role": {"sync": sync.LocalSGD(4), "micro": 4},
        "one unit": {"sync": sync.LocalSGD(4), "balance": own},
        "all-reduce": {"balance": own, "micro": 4},
    }
    with pytest.raises(pl.SettingError) as caught:
        pl.Run(model, optimizer, data(LENGTH), batch=own, **roles[make])
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"), [("one role", "as balance"), ("one unit", "a micro of at most half"), ("all-reduce", "LocalSGD")]
)
def test_own_batches_that_cannot_be_are_refused(pool: Pool, make: str, words: str) -> None:
    for message in pool.run(2, own_refused, make):
        assert words in message


def probes_apart() -> None:
    model = mlp()
    probe = pl.Probe(always=True, seed=int(os.environ["RANK"]))
    pl.Run(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data(LENGTH), batch=16, sync=sync.LocalSGD(2), probe=probe
    )


def compiles(rank: int) -> None:
    """Only one of the workers has numba."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.identity.has_numba", lambda: int(os.environ["RANK"]) == rank)
        model = mlp()
        rule = pl.lr.AdaScale(base=8)
        pl.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), data(LENGTH), batch=16, lr=rule, micro=4)


def test_workers_that_take_norms_in_different_ways_are_told_so(pool: Pool) -> None:
    """By a sum that differs in its last bit, one batch may grow and the other not."""
    for outcome in pool.outcomes(2, compiles, 1):
        assert isinstance(outcome, RemoteError)
        assert "the way to take norms differs between workers (rank 0: torch" in outcome.text


def test_workers_with_different_probes_are_told_so(pool: Pool) -> None:
    for outcome in pool.outcomes(2, probes_apart):
        assert isinstance(outcome, RemoteError)
        assert outcome.kind == "WorkersDisagree"
        assert "probe" in outcome.text


def idle(make: str, role: Sync) -> tuple[list[int], float, Tensor]:
    """A run in which the second worker has no example in the last step of an epoch: shares and gain."""
    model, counts = mlp(), []
    optimizer = getattr(torch.optim, make, None) or getattr(pl.optim, make)
    rule = pl.lr.AdaScale(base=2, scales=pl.lr.Scales.GRADIENT)
    run = pl.Run(model, optimizer(model.parameters(), lr=0.1), data(17), batch=8, lr=rule, micro=2, sync=role)
    with run:
        train(run, model, each=lambda step: counts.append(step.plan.counts[run.fleet.rank]), epochs=3)
    return counts, rule.gain(8), flat(model)


@pytest.mark.parametrize("role", [sync.AllReduce(), sync.LocalSGD(2)], ids=["all-reduce", "local"])
@pytest.mark.parametrize("make", ["Adagrad", "AdaGradNorm"])
def test_a_worker_without_examples_has_no_gradient_to_multiply(pool: Pool, make: str, role: Sync) -> None:
    (_, gain, first), (counts, _, second) = pool.run(2, idle, make, role)
    assert 0 in counts
    assert gain > 1
    assert torch.equal(first, second)
