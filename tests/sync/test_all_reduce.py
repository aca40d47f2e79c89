from __future__ import annotations

import hashlib
import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline.roles import Need
from tests.pool import Pool
from tests.problems import data, flat, mlp, train


class Statistics(nn.Module):
    """A linear layer, BatchNorm, and three kinds of other buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([0.1, -float("inf"), 0.3]))  # constant; 0.1 is not a whole binary
        self.register_buffer("seen", torch.zeros(()))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.seen, Tensor)
        self.seen += len(x)
        self.calls = self.calls + 1  # replaced, not written to
        out: Tensor = self.norm(self.linear(x))
        return out


def statistics(wrap: bool, steps: int) -> dict[str, Tensor]:
    model = Statistics()
    wrapped: nn.Module = model
    if wrap:
        dist.init_process_group("gloo")
        wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pl.Run(wrapped, optimizer, data(48), batch=12, order=pl.order.Sequential()) as run:
        train(run, wrapped, steps=steps)
        with run.consensus():
            return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_buffers_are_the_average_by_examples(pool: Pool) -> None:
    found = pool.run(2, statistics, False, 3)
    x, _ = data(48).tensors
    model = Statistics()
    mean, seen = torch.zeros(3), 0.0
    for step in range(3):
        halves = [model.linear(x[12 * step + 6 * rank : 12 * step + 6 * rank + 6]).detach() for rank in range(2)]
        mean = 0.9 * mean + 0.1 * torch.stack([half.mean(0) for half in halves]).mean(0)
        seen += 6  # each worker adds six, and so does their average
    for buffers in found:
        torch.testing.assert_close(buffers["norm.running_mean"], mean, rtol=0, atol=1e-6)
        assert buffers["seen"].item() == seen
        assert torch.equal(buffers["mask"], model.mask)  # type: ignore[arg-type]  # not touched, to the bit
        assert buffers["calls"].item() == 3
        for name, value in buffers.items():
            assert torch.equal(value, found[0][name])


def test_ddp_keeps_its_own_rule_for_buffers(pool: Pool) -> None:
    """Rank 0's statistics win; consensus() makes that so also after the last step."""
    first, second = pool.run(2, statistics, True, 3)
    x, _ = data(48).tensors
    model = Statistics()
    mean = torch.zeros(3)
    for step in range(3):
        mean = 0.9 * mean + 0.1 * model.linear(x[12 * step : 12 * step + 6]).detach().mean(0)
    torch.testing.assert_close(first["norm.running_mean"], mean, rtol=0, atol=1e-6)
    for name, value in first.items():
        assert torch.equal(value, second[name])


def one_without_examples_and_batch_norm(wrap: bool) -> str:
    """61 examples in steps of 58: the last has three for four workers."""
    model = Statistics()
    wrapped: nn.Module = model
    if wrap:
        dist.init_process_group("gloo")
        wrapped = DistributedDataParallel(model)
    model.norm.eval()  # of one example there is no variance
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.Run(wrapped, optimizer, data(61), batch=58) as run:
        train(run, wrapped, epochs=3)
        with run.consensus():
            return run.replica.digest()


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "ddp"])
def test_a_worker_without_examples_stays_with_the_others(pool: Pool, wrap: bool) -> None:
    assert len(set(pool.run(4, one_without_examples_and_batch_norm, wrap))) == 1


def mixed(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.Run(model, optimizer, data(60), batch=12) as run:
        for step in run.steps(epochs=1):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model[1](model[0](x).to(dtype)).float(), y))
            optimizer.step()
    return flat(model[0]), flat(model[1]).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_several_dtypes(pool: Pool, dtype: torch.dtype) -> None:
    first, second = pool.run(2, mixed, dtype)
    (alone,) = pool.run(1, mixed, dtype)
    for part, other, one in zip(first, second, alone, strict=True):
        assert torch.equal(part, other)
        # bfloat16 has 8 bits: sums of halves are rounded at 2^-9 of the value.
        torch.testing.assert_close(part, one, rtol=0, atol=1e-2 if dtype is torch.bfloat16 else 1e-6)


def half_only() -> tuple[float, str]:
    torch.manual_seed(4)
    model = nn.Linear(6, 3).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with pl.Run(model, optimizer, data(60), batch=12) as run:
        for step in run.steps(epochs=2):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x.to(torch.bfloat16)).float(), y))
            optimizer.step()
            losses.append(step.loss)
            assert step.round is not None
            assert sum(note.examples for note in step.round.notes) == 12
    return losses[-1], hashlib.sha256(flat(model).float().numpy().tobytes()).hexdigest()


def test_notes_stay_exact_where_no_gradient_is_wide_enough_for_them(pool: Pool) -> None:
    found = pool.run(2, half_only)
    assert found[0] == found[1]


def sparse() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = torch.utils.data.TensorDataset(torch.arange(10)[:, None], torch.arange(10) % 2)
    with pl.Run(model, optimizer, dataset, batch=4) as run:
        train(run, model, epochs=1)


def test_sparse_gradients_are_refused(pool: Pool) -> None:
    for outcome in pool.outcomes(2, sparse):
        assert "sparse gradient" in outcome.text
        assert "sparse=False" in outcome.text


class Scaling:
    """A rule for tests: the learning rate is halved."""

    def factor(self, progress: pl.Progress, batch: int) -> float:
        return 0.5


def test_the_learning_rate_rule_applies_for_the_step_only() -> None:
    results = []
    rules: list[tuple[Any, float]] = [(Scaling(), 0.2), (pl.lr.Constant(), 0.1)]
    for rule, rate in rules:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with pl.Run(model, optimizer, data(40), batch=8, lr=rule) as run:
            train(run, model, steps=5)
        assert optimizer.param_groups[0]["lr"] == rate
        results.append(flat(model))
    assert torch.equal(*results)


class Watchful:
    """A batch policy that asks for statistics, and remembers what it was shown."""

    needs = frozenset({Need.VARIANCE})

    def __init__(self) -> None:
        self.rounds: list[pl.Round] = []

    def __repr__(self) -> str:
        return "Watchful()"

    def size(self, progress: pl.Progress) -> int:
        return 12

    def observe(self, round: pl.Round) -> None:
        self.rounds.append(round)


def watched(wrap: bool, micro: int | None, hook: bool) -> list[Any]:
    model = mlp()
    wrapped: nn.Module = model
    if wrap:
        dist.init_process_group("gloo")
        wrapped = DistributedDataParallel(model)
        if hook:
            wrapped.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = Watchful()
    with pl.Run(wrapped, optimizer, data(60), batch=policy, micro=micro, probe=pl.Probe(exact=True)) as run:
        train(run, wrapped, steps=4)
    return [round.stats for round in policy.rounds]


def test_statistics_do_not_depend_on_who_computes(pool: Pool) -> None:
    """Four units of three examples: of four workers, of two with two micro-batches, of one; DDP-wrapped or not."""
    cases = [(4, None, False), (2, 3, False), (1, 3, False), (4, None, True), (2, 3, True)]
    found = [pool.run(workers, watched, wrap, micro, False) for workers, micro, wrap in cases]
    expected = found[0][0]
    assert [stats.units for stats in expected] == [4] * 4
    for of_case in found:
        for stats in of_case:
            for mine, other in zip(stats, expected, strict=True):
                assert mine.units == 4
                assert mine.variance == pytest.approx(other.variance, rel=1e-4)
                assert mine.mean_sqnorm == pytest.approx(other.mean_sqnorm, rel=1e-4)


def test_a_hook_of_the_users_and_the_probe_exclude_each_other(pool: Pool) -> None:
    for outcome in pool.outcomes(2, watched, True, None, True):
        assert outcome.kind == "SettingError"
        assert "communication hook of its own" in outcome.text


def compressed() -> Tensor:
    dist.init_process_group("gloo")
    model = mlp()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.Run(ddp, optimizer, data(60), batch=12, micro=3) as run:
        train(run, ddp, epochs=2)
    return flat(model)


def test_a_hook_of_the_users_is_kept(pool: Pool) -> None:
    first, second = pool.run(2, compressed)
    assert torch.equal(first, second)
    (exact,) = pool.run(1, uncompressed)
    torch.testing.assert_close(first, exact, rtol=0, atol=1e-2)  # half precision: it was at work
    assert not torch.allclose(first, exact, rtol=0, atol=1e-7)


def uncompressed() -> Tensor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.Run(model, optimizer, data(60), batch=12, micro=3) as run:
        train(run, model, epochs=2)
    return flat(model)


def scaled(workers_overflow: bool) -> tuple[Tensor, float, list[bool]]:
    """A GradScaler: one worker's gradient overflows in step 2, and all skip it."""
    rank = int(os.environ["RANK"])
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    changed: list[bool] = []
    with pl.Run(model, optimizer, data(60), batch=12, scaler=scaler, probe=pl.Probe(always=True)) as run:
        for step in run.steps(steps=5):
            before = flat(model)
            optimizer.zero_grad()
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                if workers_overflow and step.index == 2 and rank == 1:
                    loss = loss * float("inf")
                step.backward(loss)
            assert step.round is not None
            assert step.round.stats is not None
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            scaler.step(optimizer)
            scaler.update()
            changed.append(not torch.equal(before, flat(model)))
    return flat(model), scaler.get_scale(), changed


def test_a_step_that_the_scaler_skips_is_skipped_by_all(pool: Pool) -> None:
    first, second = pool.run(2, scaled, True)
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1] == 512.0
    assert first[2] == second[2] == [True, True, False, True, True]


def test_scaling_changes_nothing_else(pool: Pool) -> None:
    first, _ = pool.run(2, scaled, False)
    assert torch.equal(first[0], pool.run(2, unscaled)[0])  # a power of two: exact


def unscaled() -> Tensor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.Run(model, optimizer, data(60), batch=12) as run:
        train(run, model, steps=5)
    return flat(model)


class Extremes(nn.Module):
    """A minimum that begins at infinity, a mask that is infinite for ever, and a table that grows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(6, 3)
        self.lowest: Tensor
        self.table: Tensor
        self.register_buffer("lowest", torch.full((2,), float("inf")))
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.lowest = torch.stack([torch.minimum(self.lowest[0], x.min()), self.lowest[1]])
        self.table = torch.arange(float(len(self.table) + 1))
        out: Tensor = self.linear(x)
        return out


def extremes() -> list[Tensor]:
    model = Extremes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lowest = []
    with pl.Run(model, optimizer, data(48), batch=12, order=pl.order.Sequential()) as run:
        train(run, model, steps=2, each=lambda step: lowest.append(model.lowest.clone()))
    assert len(model.table) == 3
    return lowest


def test_buffers_that_are_infinite_or_grow(pool: Pool) -> None:
    x, _ = data(48).tensors
    first = (x[:6].min() + x[6:12].min()) / 2  # the average of what each worker saw
    for lowest in pool.run(2, extremes):
        assert lowest[0][0].item() == pytest.approx(first.item())
        assert lowest[1][0] <= lowest[0][0]
        assert lowest[1][1] == float("inf")


def shared_objects(what: str) -> None:
    first, second = mlp(), mlp()
    choices: dict[str, dict[str, Any]] = {
        "sync": {"sync": pl.sync.AllReduce()},
        "local": {"sync": pl.sync.LocalSGD(2)},
        "probe": {"probe": pl.Probe(always=True)},
    }
    settings = choices[what]
    with pl.Run(first, torch.optim.SGD(first.parameters(), lr=0.1), data(40), batch=8, **settings) as run:
        train(run, first, steps=2)
        with pytest.raises(pl.SettingError, match="serves another run that is not closed"):
            pl.Run(second, torch.optim.SGD(second.parameters(), lr=0.1), data(40), batch=8, **settings)
        train(run, first, steps=4)  # which is none the worse for it
    with pl.Run(second, torch.optim.SGD(second.parameters(), lr=0.1), data(40), batch=8, **settings) as run:
        train(run, second, steps=4)
    assert torch.equal(flat(first), flat(second))


@pytest.mark.parametrize("what", ["sync", "local", "probe"])
def test_an_object_serves_one_run_at_a_time(what: str) -> None:
    shared_objects(what)


def static_graph(micro: int | None) -> None:
    dist.init_process_group("gloo")
    model = mlp()
    ddp = DistributedDataParallel(model, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.Run(ddp, optimizer, data(48), batch=12, micro=micro) as run:
        train(run, ddp, steps=3)


def test_static_graph_takes_whole_shares_only(pool: Pool) -> None:
    assert pool.run(2, static_graph, None) == [None, None]
    for outcome in pool.outcomes(2, static_graph, 2):
        assert outcome.kind == "SettingError"
        assert "static_graph=False" in outcome.text


def padding_alone() -> Tensor:
    """Some micro-batches hold nothing but padding: the mean over nothing is NaN, and counts for nothing."""
    x, y = data(24).tensors
    y = y.clone()
    y[::2] = -100
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = torch.utils.data.TensorDataset(x, y)
    with pl.Run(model, optimizer, dataset, batch=4, micro=1, order=pl.order.Sequential()) as run:
        for step in run.steps(epochs=1):
            optimizer.zero_grad()
            for a, b in step:
                real = int((b != -100).sum())
                step.backward(F.cross_entropy(model(a), b), weight=real)
            assert step.loss == step.loss  # not NaN
            optimizer.step()
    return flat(model)


def test_a_micro_batch_of_padding(pool: Pool) -> None:
    first, second = pool.run(2, padding_alone)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    torch.testing.assert_close(pool.run(1, padding_alone)[0], first, rtol=0, atol=1e-6)


def gradients_after_the_exchange() -> int:
    """How many of the gradients of the backward pass are still held when the exchange is over."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made: list[weakref.ref[Tensor]] = []

    def note(parameter: Tensor) -> None:
        assert parameter.grad is not None
        made.append(weakref.ref(parameter.grad))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    with pl.Run(model, optimizer, data(16), batch=8) as run:
        for step in run.steps(steps=2):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
    assert len(made) == 2 * len(list(model.parameters()))
    return sum(one() is not None for one in made)


def test_gradients_are_not_held_beside_the_flat_buffer(pool: Pool) -> None:
    assert pool.run(2, gradients_after_the_exchange) == [0, 0]
