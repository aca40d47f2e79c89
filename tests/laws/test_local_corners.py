"""Corners of Local SGD: counters, caches, layers that are frozen, rates that differ; whatever it is, all end alike."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import paceline as pl
from paceline import codec, sync
from paceline.records import Note
from paceline.sync.outer import Outer
from tests.laws.test_local_sgd import Skewed
from tests.pool import Pool, RemoteError
from tests.problems import data, mlp, train

ROLES: dict[str, Callable[[], sync.LocalSGD]] = {
    "rounds": lambda: sync.LocalSGD(4),
    "overlap": lambda: sync.LocalSGD(4, overlap=2),
    "sites": lambda: sync.Hierarchical(2, 4, site="ab"[int(os.environ["RANK"]) // 2]),
}


def counting() -> nn.Module:
    """Has counters: BatchNorm's, and one of 16 bits, which gloo does not know."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model.register_buffer("calls", torch.zeros(3, dtype=torch.int16))

    def count(module: nn.Module, *_: object) -> None:
        module.get_buffer("calls").add_(1)

    model.register_forward_hook(count)
    return model


def counted(kind: str, leaves: bool) -> tuple[str, str, int]:
    """Digests in a consensus and at the end, and what this worker had counted before the last meeting."""
    warnings.filterwarnings("ignore", "1 .BatchNorm1d. takes its statistics")
    model, calls = counting(), 0
    optimizer = SGD(model.parameters(), lr=0.05)
    role = ROLES[kind]()
    with pl.Run(model, optimizer, data(60), batch=12, balance=Skewed(), sync=role, micro=3, deadline=20.0) as run:
        for step in run.steps(steps=14):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            calls = int(model.get_buffer("calls")[0])
            optimizer.step()
            if leaves and run.fleet.rank == 1 and step.index == 9:
                break
        with run.consensus():
            inside = run.replica.digest()
        return inside, run.replica.digest(), calls


@pytest.mark.parametrize("leaves", [False, True], ids=["to the end", "one leaves"])
@pytest.mark.parametrize("kind", ROLES)
def test_counters_end_alike_although_workers_count_differently(pool: Pool, kind: str, leaves: bool) -> None:
    found = pool.run(3, counted, kind, leaves)
    assert len({calls for _, _, calls in found}) > 1
    assert len({inside for inside, _, _ in found}) == 1
    assert len({end for _, end, _ in found}) == 1


def own_counters(folder: str, save_at: int | None, resume: bool) -> list[int]:
    """The counters of this worker after each step."""
    warnings.filterwarnings("ignore", "1 .BatchNorm1d. takes its statistics")
    model = counting()
    optimizer = SGD(model.parameters(), lr=0.05)
    found = []
    role = sync.LocalSGD(4)
    with pl.Run(model, optimizer, data(60), batch=12, balance=Skewed(), sync=role, micro=3, deadline=20.0) as run:
        if resume:
            run.resume(f"{folder}/saved.ckpt")

        def see(step: pl.Step) -> None:
            found.append(int(model.get_buffer("calls")[0]))
            if step.index == save_at:
                run.save(f"{folder}/saved.ckpt")

        train(run, model, steps=11, each=see)
    return found


@pytest.mark.parametrize("save_at", [3, 5], ids=["at the end of a round", "in the middle of one"])
def test_counters_are_each_workers_own_after_a_resume(pool: Pool, tmp_path: Path, save_at: int) -> None:
    whole = pool.run(2, own_counters, str(tmp_path), save_at, False)
    assert whole[0] != whole[1]
    resumed = pool.run(2, own_counters, str(tmp_path), None, True)
    assert resumed == [each[save_at + 1 :] for each in whole]


def frozen(folder: str, overlap: int, freeze_after: int, save_at: int | None, resume: bool) -> tuple[str, str]:
    """A layer is frozen in the middle; digests in a consensus soon after, and at the end."""
    model = mlp(dtype=torch.float64)
    optimizer = SGD(model.parameters(), lr=0.2)
    x, y = data(61).tensors
    inside = ""
    role = sync.LocalSGD(4, overlap=overlap)
    dataset = torch.utils.data.TensorDataset(x.double(), y)
    with pl.Run(model, optimizer, dataset, batch=12, sync=role, deadline=20.0) as run:
        if resume:
            run.resume(f"{folder}/saved.ckpt")
            freeze(model)

        def each(step: pl.Step) -> None:
            nonlocal inside
            if step.index == freeze_after:
                freeze(model)
            if step.index == save_at:
                run.save(f"{folder}/saved.ckpt")
            if step.index == freeze_after + 1:
                with run.consensus():
                    inside = run.replica.digest()

        train(run, model, steps=11, each=each)
        return inside, run.replica.digest()


def freeze(model: nn.Module) -> None:
    for parameter in next(model.children()).parameters():
        parameter.requires_grad_(False)


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("freeze_after", [3, 5], ids=["at the end of a round", "in the middle of one"])
def test_a_layer_that_is_frozen_is_averaged_once_more(
    pool: Pool, tmp_path: Path, overlap: int, freeze_after: int
) -> None:
    """Also if the run is saved and resumed before that."""
    whole = pool.run(2, frozen, str(tmp_path), overlap, freeze_after, None, False)
    assert whole[0] == whole[1]
    saved = pool.run(2, frozen, str(tmp_path), overlap, freeze_after, freeze_after + 1, False)
    resumed = pool.run(2, frozen, str(tmp_path), overlap, freeze_after, None, True)
    assert {end for _, end in (*saved, *resumed)} == {saved[0][1]}


def twins() -> nn.Module:
    """Two layers of the same shape, of which the first is trained."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].requires_grad_(False)
    return model


REFUSING: dict[str, Callable[[], sync.LocalSGD]] = {
    "outer": lambda: sync.LocalSGD(4, outer=sync.DiLoCo()),
    "overlapped outer": lambda: sync.LocalSGD(4, overlap=2, outer=sync.DiLoCo()),
    "sites with outer": lambda: sync.Hierarchical(2, 4, site="ab"[int(os.environ["RANK"]) // 2], outer=sync.DiLoCo()),
    "codec": lambda: sync.LocalSGD(4, codec=codec.Uniform8()),
    "overlapped codec": lambda: sync.LocalSGD(4, overlap=2, codec=codec.Uniform8()),
    "sites with codec": lambda: sync.Hierarchical(
        2, 4, site="ab"[int(os.environ["RANK"]) // 2], codec=codec.Uniform8()
    ),
}


def changes_what_is_trained(kind: str, how: str, at: int) -> None:
    model = twins() if how == "others" else mlp()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with pl.Run(model, optimizer, data(200), batch=12, sync=REFUSING[kind](), deadline=20.0) as run:

        def each(step: pl.Step) -> None:
            if step.index == at:
                freeze(model)
                if how == "others":
                    model.get_submodule("2").requires_grad_(True)

        train(run, model, steps=20, each=each)


@pytest.mark.parametrize(
    ("kind", "how", "at"),
    [
        ("outer", "fewer", 5),
        ("outer", "others", 3),
        ("overlapped outer", "fewer", 5),  # it would go on to move by its momentum
        ("overlapped outer", "others", 3),
        ("sites with outer", "fewer", 5),  # all momentum would be lost
        ("sites with outer", "fewer", 3),
        ("sites with outer", "others", 3),
        ("codec", "fewer", 5),
        ("codec", "others", 3),  # of the same shapes
        ("overlapped codec", "others", 3),
        ("sites with codec", "fewer", 5),
        ("sites with codec", "others", 3),
    ],
)
def test_other_parameters_are_refused_where_changes_of_each_are_counted(
    pool: Pool, kind: str, how: str, at: int
) -> None:
    outcomes = pool.outcomes(3, changes_what_is_trained, kind, how, at)
    assert all(isinstance(outcome, RemoteError) for outcome in outcomes)
    refused = [outcome for outcome in outcomes if outcome.kind == "SettingError"]
    assert refused
    assert all("freeze or thaw parameters in a new Run" in outcome.text for outcome in outcomes)


def resumes_with_others(kind: str, folder: str) -> str:
    """What is said to who goes on with another layer than that which the round was begun with."""
    model = twins()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with pl.Run(model, optimizer, data(200), batch=12, sync=REFUSING[kind](), deadline=20.0) as run:
        train(run, model, steps=6)
        run.save(f"{folder}/saved.ckpt")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    freeze(model)
    model.get_submodule("2").requires_grad_(True)
    with pl.Run(model, optimizer, data(200), batch=12, sync=REFUSING[kind](), deadline=20.0) as run:
        with pytest.raises(pl.CheckpointError) as caught:
            run.resume(f"{folder}/saved.ckpt")
        assert all(map(torch.equal, before, model.parameters()))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["outer", "overlapped outer", "sites with outer", "codec"])
def test_a_checkpoint_of_other_trained_parameters_is_refused_there(pool: Pool, tmp_path: Path, kind: str) -> None:
    for message in pool.run(3, resumes_with_others, kind, str(tmp_path)):
        assert "2 parameters were trained when the checkpoint was made, and 2, or others, are now" in message


class Listening(pl.balance.Even):
    """Writes down what it is told of."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int, int]] = []

    def observe(self, round: pl.Round) -> None:
        self.told.append((round.plan.step, round.plan.epoch, round.plan.batch))


def leaves_at(steps: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """The plans that a role is told of, by a worker that leaves in its own of these steps."""
    model, role = mlp(), Listening()
    optimizer = SGD(model.parameters(), lr=0.05)
    with pl.Run(model, optimizer, data(122), batch=12, sync=sync.LocalSGD(4), balance=role, deadline=20.0) as run:
        for step in run.steps(steps=40):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if step.index == steps[run.fleet.rank]:
                break
    return role.told


@pytest.mark.parametrize("steps", [(8, 9), (9, 8), (9, 9), (8, 9, 10), (9, 40)], ids=str)
def test_roles_of_all_workers_are_told_of_the_same_steps_although_all_leave(pool: Pool, steps: tuple[int, ...]) -> None:
    found = pool.run(len(steps), leaves_at, steps)
    assert all(told == found[0] for told in found)
    assert found[0][-1][0] == min(max(steps), 11)  # the last that somebody has done


class Cache(nn.Module):
    """Keeps a table that grows with what it has seen, as position tables do."""

    table: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1, dtype=dtype))
        self.register_buffer("same", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.table):
            self.table = self.table.new_zeros(len(x))
        self.get_buffer("same").add_(len(x))
        return x


def cached(kind: str, dtype: torch.dtype) -> list[str]:
    torch.manual_seed(3)
    model = nn.Sequential(Cache(dtype), nn.Linear(6, 3))
    optimizer = SGD(model.parameters(), lr=0.05)
    found = []
    role = ROLES[kind]() if kind in ROLES else sync.AllReduce()
    with pl.Run(model, optimizer, data(61), batch=12, balance=Skewed(), sync=role, deadline=10.0) as run:

        def look(step: pl.Step) -> None:
            with run.consensus():
                values = [*model.parameters(), model.get_buffer("0.same")]
                found.append(str([float(value.detach().sum()) for value in values]))

        train(run, model, steps=9, each=look)
        found.append(str(model.get_buffer("0.same")))
    assert len(model.get_buffer("0.table")) > 1
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("kind", [*ROLES, "all-reduce"])
def test_a_buffer_that_grows_stays_each_workers_own(pool: Pool, kind: str, dtype: torch.dtype) -> None:
    """Beside one that does not, and is rank 0's where all have the same."""
    first, second, third = pool.run(3, cached, kind, dtype)
    assert first == second == third


def resumed_cache(kind: str, dtype: torch.dtype, persistent: bool, folder: str, resume: bool) -> tuple[str, int]:
    """The digest of the end of a run, in which the cache had grown before a checkpoint, and the cache's length."""
    torch.manual_seed(3)
    cache = Cache(dtype)
    cache.register_buffer("table", cache.table, persistent=persistent)
    model = nn.Sequential(cache, nn.Linear(6, 3))
    optimizer = SGD(model.parameters(), lr=0.05)
    role = ROLES[kind]() if kind in ROLES else sync.AllReduce()
    with pl.Run(model, optimizer, data(61), batch=12, balance=Skewed(), sync=role, deadline=10.0) as run:
        if resume:
            assert run.resume(f"{folder}/saved.ckpt")

        def save(step: pl.Step) -> None:
            if step.index == 4 and not resume:
                run.save(f"{folder}/saved.ckpt")

        train(run, model, steps=9, each=save)
        return run.replica.digest(), len(cache.table)


@pytest.mark.parametrize("persistent", [True, False], ids=["in the state", "not in it"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("kind", [*ROLES, "all-reduce"])
def test_a_model_with_a_buffer_that_has_grown_is_resumed(
    pool: Pool, tmp_path: Path, kind: str, dtype: torch.dtype, persistent: bool
) -> None:
    settings = kind, dtype, persistent, str(tmp_path)
    assert pool.run(3, resumed_cache, *settings, False) == pool.run(3, resumed_cache, *settings, True)


def with_slow_momentum(seconds: bool) -> tuple[str, list[float]]:
    """The rates of the workers differ when they meet: one leaves, or each does its own number of steps."""
    model = mlp(dtype=torch.float64)
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    x, y = data(400).tensors
    rates: list[float] = []
    role = sync.LocalSGD(sync.Seconds(0.1) if seconds else 8, outer=sync.SlowMo())
    dataset = torch.utils.data.TensorDataset(x.double(), y)
    with pl.Run(model, optimizer, dataset, batch=12, sync=role, deadline=20.0) as run:
        for step in run.steps(steps=24):
            optimizer.zero_grad()
            for inputs, targets in step:
                step.backward(F.cross_entropy(model(inputs), targets))
                if seconds and run.fleet.rank == 1:
                    time.sleep(0.02)  # so that it does fewer steps in a round
            optimizer.step()
            scheduler.step()
            if step.round is not None and len(set(rates)) < 2:
                rates = [note.rate for note in step.round.notes]
            if not seconds and run.fleet.rank == 1 and step.index == 10:
                break
        return run.replica.digest(), rates


@pytest.mark.parametrize("seconds", [False, True], ids=["one leaves", "seconds"])
def test_slow_momentum_is_the_same_on_all_workers(pool: Pool, seconds: bool) -> None:
    found = pool.run(2, with_slow_momentum, seconds)
    assert found[0][0] == found[1][0]
    assert any(len(set(rates)) == 2 for _, rates in found)  # the rates of the two did differ when they met


def rates_told(folder: str, resume: bool) -> list[float]:
    """The rate of each round, of steps whose rates differ; half a round may be from a checkpoint."""
    model = mlp(dtype=torch.float64)
    optimizer = SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    x, y = data(400).tensors
    role = sync.LocalSGD(3, outer=sync.SlowMo())
    dataset = torch.utils.data.TensorDataset(x.double(), y)
    rates: list[float] = []
    settings = {"lr": pl.lr.Linear(base=3), "stateful": {"scheduler": scheduler}}
    with pl.Run(model, optimizer, dataset, batch=12, sync=role, **settings) as run:  # type: ignore[arg-type]
        if resume:
            run.resume(f"{folder}/saved.ckpt")

        def each(step: pl.Step) -> None:
            if step.round is not None:
                rates.append(step.round.notes[1].rate)
            scheduler.step()
            if step.index == 1 and not resume:
                run.save(f"{folder}/saved.ckpt")

        train(run, model, each=each, steps=6)
    return rates


def test_slow_momentum_is_told_the_mean_of_the_rates_that_were_applied(pool: Pool, tmp_path: Path) -> None:
    applied = [0.5 * 0.9**step * 12 / 3 for step in range(6)]
    for resume in (False, True):
        for rates in pool.run(2, rates_told, str(tmp_path), resume):
            assert rates == pytest.approx([sum(applied[:3]) / 3, sum(applied[3:]) / 3], rel=1e-9)


def test_the_rate_of_slow_momentum_is_the_mean_by_weight() -> None:
    outer = Outer(sync.SlowMo())
    same, other = Note(weight=3.0, rate=0.1), Note(weight=1.0, rate=0.5)
    assert (
        outer._rate([same, Note(weight=7.0, rate=0.1), Note(rate=0.7)]) == 0.1
    )  # to the bit; who did nothing has none
    assert outer._rate([same, other]) == pytest.approx(0.2)
    assert Outer(sync.DiLoCo())._rate([same, other]) == 1.0


def bytes_at_the_end(overlap: int) -> list[int]:
    """What this worker sent in each step."""
    torch.manual_seed(3)
    model = nn.Linear(1000, 3)
    optimizer = SGD(model.parameters(), lr=0.05)
    sent: list[int] = []
    role = sync.LocalSGD(4, overlap=overlap, codec=codec.Uniform8())
    with pl.Run(model, optimizer, data(61, features=1000), batch=12, sync=role, deadline=20.0) as run:
        train(run, model, steps=8, each=lambda step: sent.append(run.sync.bytes_sent))
    return sent


def test_what_makes_all_equal_in_the_end_is_counted(pool: Pool) -> None:
    """With averages in the background: once more the whole model, in full precision."""
    plain, overlapped = pool.run(2, bytes_at_the_end, 0)[0], pool.run(2, bytes_at_the_end, 2)[0]
    assert overlapped[-1] - plain[-1] > 4 * 3003


def images(how: str) -> tuple[str, Tensor]:
    """A model whose images lie channels last, with an optimizer whose state one worker has to make up."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 2))
    last = how == "both" or (how == "one" and int(os.environ["RANK"]) == 1)
    if last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    dataset = torch.utils.data.TensorDataset(torch.randn(64, 3, 6, 6, generator=generator), torch.arange(64) % 2)
    role = sync.LocalSGD(2, optimizer_state=sync.Average())
    with pl.Run(model, optimizer, dataset, batch=8, sync=role, balance=pl.balance.Fixed([1, 0])) as run:
        for step in run.steps(steps=4):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        state = optimizer.state[model[0].weight]["exp_avg"]  # type: ignore[index]
        return run.replica.digest(), state.contiguous().clone()


def test_state_is_arranged_as_its_parameter_is(pool: Pool) -> None:
    """A worker that had no examples makes room for what the others have: in the order in which they have it."""
    (_, plain), _ = pool.run(2, images, "none")
    for found in (pool.run(2, images, "both"), pool.run(2, images, "none")):
        (first, own), (second, other) = found
        assert first == second
        assert torch.equal(own, other)
        torch.testing.assert_close(own, plain)


def test_workers_that_arrange_a_model_differently_are_told(pool: Pool) -> None:
    for outcome in pool.outcomes(2, images, "one"):
        assert isinstance(outcome, RemoteError)
        assert outcome.kind == "WorkersDisagree"
        assert "the set of averaged tensors differs between workers" in outcome.text


def goes_back(path: str) -> str:
    """To where no worker's optimizer had any state; worker 1 makes none of its own."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    role = sync.LocalSGD(2, optimizer_state=sync.Average())
    shares = pl.balance.Fixed([1, 0])
    with pl.Run(model, optimizer, data(64), batch=8, sync=role, balance=shares, deadline=10.0) as run:
        run.save(path)
        for _ in range(2):
            run.resume(path)
            train(run, model, steps=4)
        return run.replica.digest()


def test_going_back_to_where_no_optimizer_had_state(pool: Pool, tmp_path: Path) -> None:
    assert len(set(pool.run(2, goes_back, str(tmp_path / "begin.ckpt")))) == 1


def one_site_has_nothing() -> str:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    site = "ab"[int(os.environ["RANK"]) // 2]
    role = sync.Hierarchical(1, 2, site=site, optimizer_state=sync.Average())
    shares = pl.balance.Fixed([1, 1, 0])
    with pl.Run(model, optimizer, data(64), batch=8, sync=role, balance=shares, deadline=10.0) as run:
        for step in run.steps(steps=5):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        averaged = torch.cat([value.reshape(-1) for value in sync.Average().averaged(optimizer)])
        return f"{run.replica.digest()} {float(averaged.double().sum())}"


def test_a_site_without_examples_has_the_state_of_the_others(pool: Pool) -> None:
    assert len(set(pool.run(3, one_site_has_nothing))) == 1


class TwoHeads(nn.Module):
    """Uses one of two layers at its end, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        chosen: Tensor = self.heads[which](x)
        return chosen


def a_gradient_comes_late(kind: str) -> tuple[str, str]:
    """From the third round on, the last worker alone trains the second layer."""
    model, rank = TwoHeads(), int(os.environ["RANK"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = sync.Average()
    sites = sync.Hierarchical(1, 2, site="aab"[rank], optimizer_state=state)
    role = sync.LocalSGD(2, optimizer_state=state) if kind == "rounds" else sites
    with pl.Run(model, optimizer, data(96), batch=12, sync=role, deadline=10.0) as run:
        for step in run.steps(steps=8):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x.float(), int(step.index >= 4 and rank == 2)), y))
            optimizer.step()
        steps = [float(optimizer.state[p]["step"]) for p in model.parameters()]
        averaged = torch.cat([value.reshape(-1) for value in state.averaged(optimizer)])
        assert min(steps) > 0
        return run.replica.digest(), str(float(averaged.double().sum()))


@pytest.mark.parametrize("kind", ["rounds", "sites"])
def test_a_parameter_may_get_its_first_gradient_in_any_round(pool: Pool, kind: str) -> None:
    assert len(set(pool.run(3, a_gradient_comes_late, kind))) == 1


def with_a_default_of(dtype: torch.dtype) -> str:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = mlp(dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = data(400).tensors
        dataset = torch.utils.data.TensorDataset(x.float(), y)
        with pl.Run(model, optimizer, dataset, batch=12, sync=sync.LocalSGD(2)) as run:
            for step in run.steps(steps=5):
                optimizer.zero_grad()
                for inputs, targets in step:
                    step.backward(F.cross_entropy(model(inputs), targets))
                optimizer.step()
            return run.replica.digest()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_torchs_default_dtype_makes_no_difference(pool: Pool, size: int, dtype: torch.dtype) -> None:
    """What travels beside the model (notes, digests of plans) needs single precision."""
    assert len(set(pool.run(size, with_a_default_of, dtype))) == 1


def runs_in_turn(kind: str) -> list[int]:
    """Open files that are shared with the other worker, after each of several runs that are closed and kept."""
    kept, found = [], []
    for _ in range(4):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        role = sync.LocalSGD(2) if kind == "local" else sync.AllReduce()
        with pl.Run(model, optimizer, data(100), batch=12, sync=role) as run:
            for step in run.steps(steps=4):
                optimizer.zero_grad()
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
                optimizer.step()
            with run.consensus():
                pass
        kept.append(role)
        gc.collect()
        names = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
        found.append(sum("memfd:paceline" in name for name in names))
    return found


@pytest.mark.parametrize("kind", ["local", "all-reduce"])
def test_a_closed_run_keeps_nothing_that_was_shared(pool: Pool, kind: str) -> None:
    for found in pool.run(2, runs_in_turn, kind):
        assert set(found) == {0}
