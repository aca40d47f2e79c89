"""Local SGD: one step per round is all-reduce; more are a loop that anybody could write; all workers end alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.utils.data import TensorDataset

import paceline as pl
from paceline import sync
from paceline.events import StepDone
from tests.pool import Pool
from tests.problems import data, flat, mlp, train

LENGTH = 61  # prime: every epoch ends with a ragged step
BATCH = 12

MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.2),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=0.02),
    "adagrad": lambda parameters: Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1),
}


@dataclass(frozen=True)
class Skewed:
    """Unequal shares; with few examples left, rank 0 has none."""

    def split(self, batch: int, workers: int) -> Sequence[int]:
        shares = [batch * (rank + 1) // (workers * (workers + 1) // 2) for rank in range(workers)]
        shares[-1] += batch - sum(shares)
        return [0, *shares[1:-1], shares[-1] + shares[0]] if batch < 2 * workers else shares


def numbers(length: int = LENGTH) -> TensorDataset:
    x, y = data(length).tensors
    return TensorDataset(x.double(), y)


def trained(role: Callable[[], Any], kind: str, goal: dict[str, Any], micro: int | None = None) -> tuple[Tensor, str]:
    """The parameters at the end, and a digest of the whole replica."""
    model = mlp(dtype=torch.float64)
    optimizer = MAKERS[kind](model.parameters())
    with pl.Run(model, optimizer, numbers(), batch=BATCH, balance=Skewed(), sync=role(), micro=micro) as run:
        train(run, model, **goal)
        return flat(model), run.replica.digest()


@dataclass(frozen=True)
class Local:
    """Makes the role in the worker: roles belong to one run."""

    every: Any
    optimizer_state: Any = sync.Keep()  # noqa: RUF009
    outer: str | None = None

    def __call__(self) -> sync.LocalSGD:
        outer = {None: None, "diloco": sync.DiLoCo(0.7, 0.9), "slowmo": sync.SlowMo(1.0, 0.5)}[self.outer]
        return sync.LocalSGD(self.every, optimizer_state=self.optimizer_state, outer=outer)


class Workers:
    """The loop that anybody could write: all workers in one process, one after the other."""

    def __init__(self, size: int, kind: str) -> None:
        self.models = [mlp(dtype=torch.float64) for _ in range(size)]
        self.optimizers = [MAKERS[kind](model.parameters()) for model in self.models]
        self.used = [0] * size

    def step(self, parts: Sequence[Tensor], x: Tensor, y: Tensor) -> None:
        for rank, ids in enumerate(parts):
            if len(ids):
                self.optimizers[rank].zero_grad()
                F.cross_entropy(self.models[rank](x[ids]), y[ids]).backward()  # type: ignore[no-untyped-call]
                self.optimizers[rank].step()
                self.used[rank] += len(ids)

    @torch.no_grad()
    def average(self, state: Any) -> None:
        total = sum(self.used)

        def mean(tensors: Sequence[Tensor]) -> Tensor:
            return sum((n / total) * each for n, each in zip(self.used, tensors, strict=True))  # type: ignore[return-value]

        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            value = mean(parameters).clone()
            for parameter in parameters:
                parameter.copy_(value)
        if isinstance(state, sync.Average):
            for slot in range(len(list(self.models[0].parameters()))):
                states = [opt.state[opt.param_groups[0]["params"][slot]] for opt in self.optimizers]
                for key, value in states[0].items():
                    if isinstance(value, Tensor):
                        together = mean([each[key] for each in states]).clone()
                        for each in states:
                            each[key].copy_(together)
        self.used = [0] * len(self.models)


def by_hand(size: int, kind: str, every: int, state: Any, epochs: int) -> Tensor:
    x, y = numbers().tensors
    workers = Workers(size, kind)
    steps = 0
    for epoch in range(epochs):
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(epoch))
        for at in range(0, LENGTH, BATCH):
            ids = order[at : at + BATCH]
            workers.step(torch.split(ids, list(Skewed().split(len(ids), size))), x, y)
            steps += 1
            if steps % every == 0:
                workers.average(state)
                if isinstance(state, sync.Reset):
                    workers.optimizers = [MAKERS[kind](model.parameters()) for model in workers.models]
    if sum(workers.used):
        workers.average(state)
    return flat(workers.models[0])


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_one_step_per_round_with_sgd_is_all_reduce(pool: Pool, size: int, micro: int | None) -> None:
    """In double precision, to the rounding of sums in another order."""
    goal = {"epochs": 3}
    expected = pool.run(size, trained, sync.AllReduce, "sgd", goal, micro)
    for found, want in zip(pool.run(size, trained, Local(1), "sgd", goal, micro), expected, strict=True):
        torch.testing.assert_close(found[0], want[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw", "adagrad"])
@pytest.mark.parametrize("state", [sync.Keep(), sync.Average(), sync.Reset()], ids=["keep", "average", "reset"])
@pytest.mark.parametrize("size", [2, 3])
def test_rounds_are_what_one_would_write(pool: Pool, size: int, kind: str, state: Any) -> None:
    """Unequal shares, steps without examples, and a last round that is not full."""
    found = pool.run(size, trained, Local(4, state), kind, {"epochs": 3})
    assert len({digest for _, digest in found}) == 1
    # Some state is in single precision whatever the parameters are: the count of steps, which is averaged, too.
    tolerance = 1e-7 if isinstance(state, sync.Average) and kind in ("adamw", "adagrad") else 1e-12
    torch.testing.assert_close(found[0][0], by_hand(size, kind, 4, state, 3), rtol=0, atol=tolerance)


def outer_by_hand(make: Callable[[Any], Optimizer], every: int, epochs: int) -> Tensor:
    """The outer optimizer sees start - average as a gradient, at the start."""
    x, y = numbers().tensors
    workers = Workers(3, "momentum")
    start = copy.deepcopy(workers.models[0])
    outer = make(start.parameters())
    steps = 0
    for epoch in range(epochs):
        order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(epoch))
        for at in range(0, LENGTH, BATCH):
            ids = order[at : at + BATCH]
            workers.step(torch.split(ids, list(Skewed().split(len(ids), 3))), x, y)
            steps += 1
            last = epoch == epochs - 1 and at + BATCH >= LENGTH
            if steps % every == 0 or last:
                workers.average(sync.Keep())
                for first, mean in zip(start.parameters(), workers.models[0].parameters(), strict=True):
                    first.grad = first.detach() - mean.detach()
                outer.step()
                for model in workers.models:
                    model.load_state_dict(start.state_dict())
    return flat(workers.models[0])


class SlowMoByTheBook(Optimizer):
    """Algorithm 1 of Wang et al. (2020), with the inner learning rate written out."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.u: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gamma, alpha, beta = 0.1, 1.0, 0.5
        for parameter in self.param_groups[0]["params"]:
            u = beta * self.u.get(parameter, torch.zeros_like(parameter)) + parameter.grad / gamma
            self.u[parameter] = u
            parameter -= alpha * gamma * u


@pytest.mark.parametrize(
    ("recipe", "make"),
    [("diloco", lambda ps: SGD(ps, lr=0.7, momentum=0.9, nesterov=True)), ("slowmo", SlowMoByTheBook)],
    ids=["diloco", "slowmo"],
)
def test_an_outer_optimizer_steps_from_where_the_round_began(
    pool: Pool, recipe: str, make: Callable[[Any], Optimizer]
) -> None:
    found = pool.run(3, trained, Local(4, outer=recipe), "momentum", {"epochs": 3})
    assert len({digest for _, digest in found}) == 1
    torch.testing.assert_close(found[0][0], outer_by_hand(make, 4, 3), rtol=0, atol=1e-12)


def rounds(every: Any, goal: dict[str, Any]) -> list[tuple[int, int, list[int]]]:
    """Step, steps and counts of each recorded round."""
    seen: list[tuple[int, int, list[int]]] = []

    class Keeps:
        def record(self, event: Any) -> None:
            if isinstance(event, StepDone):
                seen.append((event.step, event.steps, event.counts))

        def close(self) -> None:
            pass

    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pl.Run(model, optimizer, data(64), batch=8, sync=sync.LocalSGD(every), record=[Keeps()]) as run:
        train(run, model, **goal)
    return seen


@pytest.mark.parametrize(
    ("every", "lengths"),
    [
        (4, [4, 4, 2]),
        (sync.Examples(20), [3, 3, 3, 1]),
        (sync.PostLocal(3, 4), [1, 1, 1, 4, 3]),
        (sync.Ramp(1, 4, 2.0, 2), [1, 1, 2, 4, 2]),
        (sync.Ramp(4, 1, 0.5, 4), [4, 2, 2, 1, 1]),
    ],
    ids=["steps", "examples", "post-local", "growing", "shrinking"],
)
def test_when_rounds_end(pool: Pool, every: Any, lengths: list[int]) -> None:
    """Ten steps of eight examples: the record shows each round with its steps and the examples of each worker."""
    found, nothing = pool.run(2, rounds, every, {"steps": 10})
    assert nothing == []
    assert [steps for _, steps, _ in found] == lengths
    assert [step + 1 for step, _, _ in found] == [sum(lengths[: at + 1]) for at in range(len(lengths))]
    assert [counts for _, _, counts in found] == [[4 * steps, 4 * steps] for steps in lengths]


def looked_at_in_the_middle(with_batch_norm: bool) -> tuple[str, str, str, Tensor, float]:
    """Digests before, inside and after a consensus in the middle of a round, and what an average should be."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if with_batch_norm else nn.Tanh(), nn.Linear(8, 3))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pl.Run(model, optimizer, data(60), batch=9, balance=Skewed(), sync=sync.LocalSGD(5)) as run:
        used, found = 0, ()

        def look(step: pl.Step) -> None:
            nonlocal used, found
            used += step.plan.counts[run.fleet.rank]
            if step.index == 2:
                own, before = flat(model), run.replica.digest()
                with run.consensus():
                    inside, mean = run.replica.digest(), flat(model)
                total = 3 * 9
                share = own.double() * used / total
                run.fleet.all_reduce(share, "the test's own average")
                error = float((share - mean.double()).abs().max())
                found = (before, inside, run.replica.digest(), mean, error)  # type: ignore[assignment]

        train(run, model, each=look, steps=4)
        return found  # type: ignore[return-value]


@pytest.mark.parametrize("with_batch_norm", [False, True])
def test_consensus_is_the_weighted_average_and_then_back(pool: Pool, with_batch_norm: bool) -> None:
    found = pool.run(2, looked_at_in_the_middle, with_batch_norm)
    befores, insides, afters, _, errors = zip(*found, strict=True)
    assert len(set(befores)) == 2  # in the middle of a round the workers differ
    assert len(set(insides)) == 1
    assert befores == afters
    assert max(errors) < 1e-6  # single precision


def stopped_and_resumed(folder: Path, save_at: int | None, resume: bool, local: Local, kind: str) -> str:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    optimizer = MAKERS[kind](model.parameters())
    with pl.Run(model, optimizer, data(60), batch=BATCH, balance=Skewed(), sync=local()) as run:
        if resume:
            run.resume(folder / "saved.ckpt")

        def save(step: pl.Step) -> None:
            if save_at == step.index + 1:
                run.save(folder / "saved.ckpt")

        train(run, model, each=save, steps=14)
        return run.replica.digest()


@pytest.mark.parametrize("save_at", [1, 3, 4, 5, 7, 8])
@pytest.mark.parametrize(
    ("local", "kind"),
    [
        (Local(4), "momentum"),
        (Local(4, sync.Average()), "adamw"),
        (Local(3, outer="diloco"), "adamw"),
        (Local(sync.PostLocal(4, sync.Examples(30)), sync.Reset(), outer="slowmo"), "adagrad"),
    ],
    ids=["keep", "average", "diloco", "slowmo"],
)
def test_resume_at_any_step_of_a_round_is_never_having_stopped(
    pool: Pool, tmp_path: Path, local: Local, kind: str, save_at: int
) -> None:
    """To the bit, and saving changes nothing: the run that saves ends like the one that does not."""
    never = pool.run(2, stopped_and_resumed, tmp_path, None, False, local, kind)
    saved = pool.run(2, stopped_and_resumed, tmp_path, save_at, False, local, kind)
    resumed = pool.run(2, stopped_and_resumed, tmp_path, None, True, local, kind)
    assert never == saved == resumed
    assert len(set(never)) == 1


PHASES = ["before the inner loop", "in the inner loop", "before the optimizer", "after the optimizer"]


def left_early(leavers: dict[int, tuple[int, str]], every: Any, steps: int) -> tuple[str, tuple[int, int], Tensor]:
    """Train; some workers leave the loop at a step and phase of their own."""
    model = mlp(dtype=torch.float64)
    optimizer = MAKERS["momentum"](model.parameters())
    with pl.Run(model, optimizer, numbers(), batch=BATCH, balance=Skewed(), sync=sync.LocalSGD(every), micro=2) as run:
        at, phase = leavers.get(run.fleet.rank, (-1, ""))
        for step in run.steps(steps=steps):
            here = phase if step.index == at else ""
            if here == PHASES[0]:
                break
            optimizer.zero_grad()
            for number, (x, y) in enumerate(step):
                if here == PHASES[1] and number:
                    break
                step.backward(F.cross_entropy(model(x), y))
            if here in PHASES[1:3]:
                break
            optimizer.step()
            if here == PHASES[3]:
                break
        with run.consensus():
            inside = run.replica.digest()
        assert inside == run.replica.digest()
        return inside, (run.progress.step, run.progress.examples), flat(model)


def left_by_hand(size: int, leavers: dict[int, tuple[int, str]], every: int, steps: int) -> tuple[int, Tensor]:
    """Who has left does nothing more; with the round in which the first leaves, all end."""
    x, y = numbers().tensors
    workers = Workers(size, "momentum")
    done, order = 0, torch.empty(0)
    while done < steps:
        at = done % 6  # steps of an epoch: 61 examples in batches of 12
        if at == 0:
            order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(done // 6))
        ids = order[at * BATCH : (at + 1) * BATCH]
        parts = list(torch.split(ids, list(Skewed().split(len(ids), size))))
        for rank, (last, phase) in leavers.items():
            if done > last or (done == last and phase != PHASES[3]):
                parts[rank] = parts[rank][:0]
        gone = all(rank in leavers and not len(part) for rank, part in enumerate(parts))
        workers.step(parts, x, y)
        if not gone:
            done += 1
        # Who leaves just after an average is missed at the next one.
        left = any(last + (phase == PHASES[3]) < done for last, phase in leavers.values())
        if gone or done % every == 0 or done == steps:
            if sum(workers.used):
                workers.average(sync.Keep())
            if gone or left:
                break
    return done, flat(workers.models[0])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.sampled_from([2, 3]),
    rank=st.integers(0, 2),
    at=st.integers(0, 8),
    phase=st.sampled_from(PHASES),
    every=st.sampled_from([1, 3, 4]),
)
def test_a_worker_may_leave_at_any_phase_of_a_round(
    pool: Pool, size: int, rank: int, at: int, phase: str, every: int
) -> None:
    """Nobody hangs, nobody fails; all end with the same model, in which everybody's examples have their true weight."""
    leavers = {rank % size: (at, phase)}
    found = pool.run(size, left_early, leavers, every, 11)
    assert len({digest for digest, _, _ in found}) == 1
    assert len({progress for _, progress, _ in found}) == 1
    steps, expected = left_by_hand(size, leavers, every, 11)
    assert found[0][1][0] == steps
    torch.testing.assert_close(found[0][2], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "leavers",
    [
        dict.fromkeys(range(3), (5, PHASES[3])),
        dict.fromkeys(range(3), (4, PHASES[0])),
        {0: (3, PHASES[3]), 1: (4, PHASES[1]), 2: (5, PHASES[2])},
        {0: (10, PHASES[3])},
        {0: (10, PHASES[3]), 1: (10, PHASES[3]), 2: (10, PHASES[3])},
    ],
    ids=["all", "all before", "one after the other", "one at the end", "all at the end"],
)
def test_several_may_leave(pool: Pool, leavers: dict[int, tuple[int, str]]) -> None:
    found = pool.run(3, left_early, leavers, 4, 11)
    assert len({digest for digest, _, _ in found}) == 1
    assert len({progress for _, progress, _ in found}) == 1
    steps, expected = left_by_hand(3, leavers, 4, 11)
    assert found[0][1][0] == steps
    torch.testing.assert_close(found[0][2], expected, rtol=0, atol=1e-12)


def left_before_its_first_step(kind: str) -> tuple[str, Tensor, int]:
    """Rank 1 has no optimizer state when the others average theirs; it gets the average, and counts nothing in it."""
    model = mlp(dtype=torch.float64)
    optimizer = MAKERS[kind](model.parameters())
    role = sync.LocalSGD(4, optimizer_state=sync.Average())
    with pl.Run(model, optimizer, numbers(), batch=BATCH, balance=Skewed(), sync=role, deadline=10.0) as run:
        for step in run.steps(steps=8):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            if run.fleet.rank == 1:
                break
            optimizer.step()
        digest = run.replica.digest()
        state = [value for each in optimizer.state_dict()["state"].values() for _, value in sorted(each.items())]
        return digest, torch.cat([value.double().flatten() for value in state]), run.progress.step


@pytest.mark.parametrize("kind", ["momentum", "adamw", "adagrad"])
def test_who_has_no_optimizer_state_yet_gets_the_average(pool: Pool, kind: str) -> None:
    found = pool.run(3, left_before_its_first_step, kind)
    assert len({digest for digest, _, _ in found}) == 1
    assert {steps for _, _, steps in found} == {4}
    for _, state, _ in found[1:]:
        assert torch.equal(state, found[0][1])
    assert found[0][1].abs().max() > 0


def frozen_in_the_middle(role: Callable[[], Any]) -> tuple[str, str]:
    model = mlp(dtype=torch.float64)
    optimizer = SGD(model.parameters(), lr=0.2)
    first = next(iter(model.children()))
    with pl.Run(model, optimizer, numbers(), batch=BATCH, sync=role()) as run:

        def freeze(step: pl.Step) -> None:
            for p in first.parameters():
                p.requires_grad_(step.index < 1)

        train(run, model, steps=6, each=freeze)
        with run.consensus():
            inside = run.replica.digest()
        train(run, model, steps=8, each=freeze)
        return inside, run.replica.digest()


@pytest.mark.parametrize("role", [Local(4), Local(sync.Examples(50))], ids=["steps", "examples"])
def test_a_layer_that_is_frozen_in_the_middle_of_a_round_is_averaged_all_the_same(pool: Pool, role: Local) -> None:
    first, second = pool.run(2, frozen_in_the_middle, role)
    assert first == second


def swapped() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)).double()
    optimizer = SGD(model.parameters(), lr=0.0)
    for p in model[1].parameters():
        p.requires_grad_(False)
    with pl.Run(model, optimizer, numbers(), batch=BATCH, sync=Local(2, outer="diloco")()) as run:

        def swap(step: pl.Step) -> None:
            if step.index == 1:
                for one, other in zip(model[0].parameters(), model[1].parameters(), strict=True):
                    one.requires_grad_(False)
                    other.requires_grad_(True)

        train(run, model, steps=4, each=swap)


def test_an_outer_optimizer_does_not_take_one_layer_for_another(pool: Pool) -> None:
    for outcome in pool.outcomes(2, swapped):
        assert outcome.kind == "SettingError"
        assert "freeze or thaw parameters in a new Run" in outcome.text


class Bar:
    """Holds what it iterates over, as progress bars do."""

    def __init__(self, steps: Any) -> None:
        self.steps = steps

    def __iter__(self) -> Any:
        yield from self.steps


def held(leavers: tuple[int, ...]) -> str:
    model = mlp(dtype=torch.float64)
    optimizer = SGD(model.parameters(), lr=0.2)
    with pl.Run(model, optimizer, numbers(), batch=BATCH, sync=sync.LocalSGD(8)) as run:
        bar = Bar(run.steps(steps=24))
        iterator = iter(bar)
        for step in iterator:
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if step.index == 5 and run.fleet.rank in leavers:
                break
        rank = run.fleet.rank
    assert bar.steps is not None
    assert rank in (0, 1)
    return str(flat(model).tolist())


@pytest.mark.parametrize("leavers", [(0, 1), (1,)])
def test_a_loop_that_a_progress_bar_holds_is_left_all_the_same(pool: Pool, leavers: tuple[int, ...]) -> None:
    first, second = pool.run(2, held, leavers)
    assert first == second


def complex_model() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    model = nn.ParameterList([parameter])
    with pl.Run(
        model,
        SGD(model.parameters(), lr=0.1),
        data(LENGTH),
        batch=BATCH,
        sync=sync.LocalSGD(2, codec=pl.codec.Uniform8()),
    ) as run:
        for step in run.steps(steps=2):
            for x, _ in step:
                step.backward((x.sum() * parameter).abs().sum())
            run.optimizer.step()


def test_a_codec_does_not_drop_imaginary_parts(pool: Pool) -> None:
    for outcome in pool.outcomes(2, complex_model):
        assert outcome.kind == "SettingError"
        assert "complex" in outcome.text


def mixed_precision_weights() -> float:
    narrow, double = nn.Linear(6, 3), nn.Linear(6, 3).double()
    model = nn.ModuleList([narrow, double])
    wide = double.weight.detach().clone()
    optimizer = SGD(model.parameters(), lr=0.0)
    sizes = pl.batch.Schedule({0: 12, 24: 20})
    with pl.Run(model, optimizer, data(LENGTH), batch=sizes, sync=sync.LocalSGD(2)) as run:
        for step in run.steps(steps=60):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(narrow(x), y) + F.cross_entropy(double(x.double()), y).float())
            optimizer.step()
    return float((double.weight.detach() / wide - 1).abs().max())


def test_weights_are_exact_for_double_parameters_beside_single_ones(pool: Pool) -> None:
    # Thirty averages of equal models; in single precision the weights alone would move them by 5e-7.
    assert max(pool.run(2, mixed_precision_weights)) < 1e-12
