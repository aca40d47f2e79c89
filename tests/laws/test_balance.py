"""Shares by speed: whoever takes how many, and however often that changes, the run is one process on the union."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import paceline as pl
from paceline import record, sync
from paceline.balance import BySpeed
from paceline.events import Event, Remark, StepDone
from paceline.memory import ran_out
from tests.pool import Pool
from tests.problems import data, flat, mlp

LENGTH = 61
BATCH = 24
SECONDS = (0.001, 0.002, 0.004)  # that an example takes on each worker


class Slow(nn.Module):
    """Takes its time for every example, and has memory for so many."""

    def __init__(self, model: nn.Module, seconds: float, room: int | None = None) -> None:
        super().__init__()
        self.model, self.seconds, self.room = model, seconds, room
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        time.sleep(self.seconds * len(x))
        if self.room is not None and len(x) > self.room:
            raise torch.OutOfMemoryError(f"no memory for {len(x)} examples")
        out: Tensor = self.model(x)
        return out


def _run_out(gradient: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("no memory in the backward pass")


def dataset() -> TensorDataset:
    x, y = data(LENGTH).tensors
    return TensorDataset(x.double(), y)


def trained(balance: BySpeed, role: Any = None, momentum: float = 0.9) -> tuple[Tensor, Any]:
    """The parameters, and the shares of every step."""
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=momentum)
    shares = []
    with pl.Run(model, optimizer, dataset(), batch=BATCH, balance=balance, sync=role) as run:
        slow = Slow(model, SECONDS[run.fleet.rank] if run.fleet.size > 1 else 0.0)
        for step in run.steps(epochs=6):
            shares.append(step.plan.counts)
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(slow(x), y))
            optimizer.step()
    return flat(model), shares


@pytest.mark.parametrize("every", [1, 2])
def test_shares_that_change_all_the_time_equal_one_process(pool: Pool, every: int) -> None:
    [(expected, _)] = pool.run(1, trained, BySpeed())
    found = pool.run(3, trained, BySpeed(every=every, dead_band=0.0, memory=1))
    for parameters, shares in found:
        assert shares == found[0][1]
        assert torch.equal(parameters, found[0][0])
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)
    shares = [counts for counts in found[0][1] if sum(counts) == BATCH]
    assert len(set(shares)) > 1
    assert shares[0] == (8, 8, 8)
    # About 14, 7 and 3, on average: a machine that is busy with something else upsets steps of milliseconds.
    fast, _, slow = (sum(column) for column in zip(*shares[len(shares) // 2 :], strict=True))
    assert fast > slow


def test_local_sgd_weighs_shares_by_examples(pool: Pool) -> None:
    """With one step in a round, and no momentum, the average of models is that of gradients."""
    [(expected, _)] = pool.run(1, trained, BySpeed(), None, 0.0)
    found = pool.run(3, trained, BySpeed(every=1, dead_band=0.0, memory=1), sync.LocalSGD(1), 0.0)
    for parameters, shares in found:
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)
        whole = [counts for counts in shares if sum(counts) == BATCH]
        fast, _, slow = (sum(column) for column in zip(*whole[len(whole) // 2 :], strict=True))
        assert fast > slow


def short_of_memory(balance: Any, record_in: str) -> tuple[Tensor, Any, list[str]]:
    """Worker 1 has room for 5 examples at once."""
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with (
        warnings.catch_warnings(record=True) as said,
        pl.Run(model, optimizer, dataset(), batch=BATCH, balance=balance, record=record_in or ()) as run,
    ):
        warnings.simplefilter("always")
        slow = Slow(model, 0.0005, 5 if run.fleet.rank == 1 else None)
        shares = []
        for step in run.steps(epochs=4):
            shares.append(step.plan.counts)
            optimizer.zero_grad()
            for x, y in step:
                with step.attempt():
                    step.backward(F.cross_entropy(slow(x), y))
            optimizer.step()
    return flat(model), (shares, slow.sizes), [str(one.message) for one in said]


@pytest.mark.parametrize("kind", ["by speed", "even"])
def test_memory_that_runs_out_loses_nothing(pool: Pool, tmp_path: Path, kind: str) -> None:
    balance: Any = BySpeed(every=3) if kind == "by speed" else pl.balance.Even()
    [(expected, _, _)] = pool.run(1, short_of_memory, balance, "")
    found = pool.run(2, short_of_memory, balance, str(tmp_path))
    for parameters, _, _ in found:
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)
    shares, sizes = found[1][1]
    assert sizes[:4] == [12, 6, 3, 3]  # and again from the beginning of the step, until it fits
    assert max(sizes[2:]) <= 6
    assert [told for told in found[1][2] if "memory" in told] == [
        "12 examples at once are too many for this worker's memory (step 0); the step is done again with at most 6",
        "6 examples at once are too many for this worker's memory (step 0); the step is done again with at most 3",
    ]
    assert not [told for told in found[0][2] if "memory" in told]
    remarks = [event.text for event in record.read(tmp_path / "events.jsonl") if isinstance(event, Remark)]
    if kind == "by speed":
        assert all(counts[1] <= 3 for counts in shares[1:])
        [remark] = remarks
        assert remark.startswith("worker 1 ran out of memory; its share is at most 3 from now on")
    else:
        assert shares[1] == (12, 12)  # in several pieces
        assert remarks == []


def fails_in_backward(rank_with_room: int) -> tuple[Tensor, list[int]]:
    """The first backward pass of worker 1 fails after a part of the gradients is there."""
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    sizes: list[int] = []
    with (
        warnings.catch_warnings(),
        pl.Run(model, optimizer, dataset(), batch=BATCH, micro=6) as run,
    ):
        warnings.simplefilter("ignore")
        fails = run.fleet.rank == rank_with_room
        for step in run.steps(steps=4):
            optimizer.zero_grad()
            for x, y in step:
                with step.attempt():
                    sizes.append(len(x))
                    hook = None
                    if fails and step.index == 1 and len(sizes) == 4:  # its second micro-batch
                        hook = model[0].weight.register_hook(_run_out)  # type: ignore[index]
                    try:
                        step.backward(F.cross_entropy(model(x), y))
                    finally:
                        if hook is not None:
                            hook.remove()
            optimizer.step()
    return flat(model), sizes


def test_gradients_of_a_backward_pass_that_failed_do_not_count(pool: Pool) -> None:
    expected = pool.run(2, fails_in_backward, -1)[0][0]
    (first, sizes), (second, others) = pool.run(2, fails_in_backward, 0)
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-12)
    assert torch.equal(first, second)
    assert sizes[:8] == [6, 6, 6, 6, 3, 3, 3, 3]
    assert others[:4] == [6, 6, 6, 6]


def attempt_with(error: Exception, wrap: bool) -> str:
    model: nn.Module = nn.Linear(6, 3)
    if wrap:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with pl.Run(model, optimizer, data(LENGTH), batch=2 if wrap else 1) as run:
            for step in run.steps(steps=1):
                for _ in step:
                    with step.attempt():
                        raise error
    except Exception as found:
        return f"{type(found).__name__}: {found}"
    return "nothing"


@pytest.mark.parametrize(
    ("error", "wrap", "words"),
    [
        (torch.OutOfMemoryError("full"), False, "LoopError: memory ran out in step 0 with a single example"),
        (MemoryError(), False, "LoopError: memory ran out in step 0 with a single example"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), False, "LoopError: memory ran out in step 0"),
        (RuntimeError("something else"), False, "RuntimeError: something else"),
        (torch.OutOfMemoryError("full"), True, "LoopError: memory ran out in step 0, and a module wrapped in"),
    ],
)
def test_what_cannot_be_attempted_again(pool: Pool, error: Exception, wrap: bool, words: str) -> None:
    for told in pool.run(2 if wrap else 1, attempt_with, error, wrap):
        assert told.startswith(words)


def fail_with(error: Exception) -> None:
    model = nn.Linear(6, 3)
    with pl.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), data(LENGTH), batch=4) as run:
        for step in run.steps(steps=1):
            for _ in step:
                raise error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError(), ValueError("no memory of that")])
def test_who_does_not_attempt_is_told_of_it(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        fail_with(error)
    told = [note for note in getattr(raised.value, "__notes__", []) if "put the whole body" in note]
    assert len(told) == (0 if isinstance(error, ValueError) else 1)


def in_two_parts(folder: str, resumed: bool) -> tuple[Any, Any]:
    """The state of the balance where a run is saved, or where it goes on."""
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    balance = BySpeed(every=2, dead_band=0.0)
    with pl.Run(model, optimizer, dataset(), batch=BATCH, balance=balance) as run:
        if resumed:
            run.resume(f"{folder}/here.ckpt")
        else:
            slow = Slow(model, SECONDS[run.fleet.rank])
            for step in run.steps(steps=7):
                optimizer.zero_grad()
                for x, y in step:
                    step.backward(F.cross_entropy(slow(x), y))
                optimizer.step()
            run.save(f"{folder}/here.ckpt")
        return balance.state_dict(), balance.split(BATCH, run.fleet.size)


def test_a_resumed_run_knows_the_speeds(pool: Pool, tmp_path: Path) -> None:
    before = pool.run(3, in_two_parts, str(tmp_path), False)
    after = pool.run(3, in_two_parts, str(tmp_path), True)
    assert after == before
    assert before[0][1] != [8, 8, 8]


def with_batch_norm(weights: list[float]) -> list[str]:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pl.Run(model, optimizer, data(96), batch=BATCH, balance=pl.balance.Fixed(weights)) as run:
            for step in run.steps(steps=3):
                optimizer.zero_grad()
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
                optimizer.step()
    return [str(one.message) for one in said]


def test_batch_norm_with_unequal_shares_is_warned_of(pool: Pool) -> None:
    first, second = pool.run(2, with_batch_norm, [2.0, 1.0])
    assert len(first) == 1
    assert first[0].startswith(
        "1 (BatchNorm1d) takes its statistics over each worker's own examples, which are [16, 8]"
    )
    assert second == []
    assert pool.run(2, with_batch_norm, [1.0, 1.0]) == [[], []]


def with_synced_norm(balance: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.SyncBatchNorm(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pl.Run(model, optimizer, data(96), batch=BATCH, balance=balance).close()


def test_speeds_are_not_measured_where_layers_wait_for_each_other(pool: Pool) -> None:
    for outcome in pool.outcomes(2, with_synced_norm, BySpeed()):
        assert "SettingError: balance=BySpeed(" in str(outcome)
        assert "in the layer 1 (SyncBatchNorm) they wait for each other" in str(outcome)
    pool.run(2, with_synced_norm, pl.balance.Even())
    pool.run(1, with_synced_norm, BySpeed())


def own_streams() -> tuple[list[int], list[tuple[int, ...]]]:
    """Every worker has 40 examples of its own."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balance = BySpeed(every=1, dead_band=0.0)
    seen: list[int] = []
    shares = []
    with pl.Run(model, optimizer, numbered(), batch=BATCH, balance=balance, local_data=True) as run:
        slow = Slow(model, SECONDS[run.fleet.rank])
        for step in run.steps(epochs=1):
            shares.append(step.plan.counts)
            optimizer.zero_grad()
            for x, y, number in step:
                seen += number.tolist()
                step.backward(F.cross_entropy(slow(x), y))
            optimizer.step()
    return seen, shares


def numbered() -> TensorDataset:
    return TensorDataset(*data(40).tensors, torch.arange(40))


def test_data_of_the_workers_comes_once_an_epoch_whatever_the_shares(pool: Pool) -> None:
    for seen, shares in pool.run(3, own_streams):
        assert sorted(seen) == list(range(40))
        assert len(set(shares)) > 2


def attempt_elsewhere(where: str) -> str:
    """An attempt that is not around the body of the inner loop."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    try:
        with pl.Run(model, optimizer, data(LENGTH), batch=4) as run:
            for step in run.steps(steps=2):
                optimizer.zero_grad()
                if where == "before":
                    with step.attempt():
                        full()
                with step.attempt() if where == "around" else contextlib.nullcontext():
                    for x, y in step:
                        if where == "around":
                            full()
                        with step.attempt():
                            if where == "forward":
                                full()
                        step.backward(F.cross_entropy(model(x), y))
                with step.attempt():
                    if where == "optimizer":
                        full()
                    optimizer.step()
    except (pl.LoopError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("before", "OutOfMemoryError: full"),
        ("optimizer", "OutOfMemoryError: full"),
        (
            "forward",
            "LoopError: memory ran out in micro-batch 1 in step 0, and step.backward is outside of step.attempt(); put "
            "the whole body of the inner loop into it",
        ),
        ("around", "LoopError: memory ran out in step 0; put step.attempt() into the loop over its micro-batches"),
    ],
)
def test_an_attempt_swallows_nothing_that_it_cannot_do_again(pool: Pool, where: str, words: str) -> None:
    assert pool.run(1, attempt_elsewhere, where) == [words]


def in_pieces(zeroed: bool) -> tuple[Any, list[int], Tensor]:
    """Worker 0 has room for 5 of the 6 examples of a micro-batch; a parameter has no gradient, but weight decay."""
    model = mlp(dtype=torch.float64)
    idle = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), idle], lr=0.2, weight_decay=0.1)
    for parameter in (*model.parameters(), idle):
        parameter.grad = torch.zeros_like(parameter)
    shares = []
    with (
        warnings.catch_warnings(),
        pl.Run(model, optimizer, dataset(), batch=BATCH, micro=6, balance=BySpeed(every=100)) as run,
    ):
        warnings.simplefilter("ignore")
        slow = Slow(model, 0.0, 5 if run.fleet.rank == 0 and zeroed else None)
        for step in run.steps(steps=3):
            shares.append(step.plan.counts)
            optimizer.zero_grad(set_to_none=False)
            for x, y in step:
                with step.attempt():
                    step.backward(F.cross_entropy(slow(x), y))
            optimizer.step()
    return shares, slow.sizes, torch.cat([flat(model), idle.detach()])


def test_shares_that_are_done_in_pieces_anyway_stay(pool: Pool) -> None:
    whole = pool.run(2, in_pieces, False)
    found = pool.run(2, in_pieces, True)
    assert found[0][0] == [(12, 12), (12, 12), (7, 6)]
    assert found[0][1] == [6, 3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 3]
    torch.testing.assert_close(found[0][2], whole[0][2], rtol=0, atol=1e-12)


class Counted(Dataset[Any]):
    """Counts in shared memory how often examples were fetched."""

    def __init__(self) -> None:
        self.x, self.y = data(120).tensors
        self.fetched = torch.zeros(1).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return 120

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        self.fetched += 1
        return self.x[at], self.y[at]


def loaded() -> float:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counted = Counted()
    with warnings.catch_warnings(), pl.Run(model, optimizer, counted, batch=8, num_workers=1) as run:
        warnings.simplefilter("ignore")
        slow = Slow(model, 0.0, 5)
        for step in run.steps(epochs=1):
            optimizer.zero_grad()
            for x, y in step:
                with step.attempt():
                    step.backward(F.cross_entropy(slow(x), y))
            optimizer.step()
    return float(counted.fetched)


def test_loaders_work_ahead_on_what_fits(pool: Pool) -> None:
    """What was guessed when memory ran out is fetched again, and nothing else."""
    assert pool.run(1, loaded)[0] <= 120 + 4 * 8


def test_what_counts_as_memory() -> None:
    assert ran_out(RuntimeError("CUDA error: out of memory"))
    assert ran_out(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"))
    assert not ran_out(pl.WorkerLost("rank 1 raised: can't allocate memory", ranks=(1,), waited_for="", seconds=0.0))
    assert not ran_out(ValueError("out of memory"))


def busy_in_sites() -> list[tuple[float, ...]]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    role = sync.Hierarchical(2, 4, site="aab"[int(os.environ["RANK"])])
    found = []
    with pl.Run(model, optimizer, data(LENGTH), batch=BATCH, sync=role) as run:
        slow = Slow(model, (0.001, 0.01, 0.01)[run.fleet.rank])
        for step in run.steps(steps=8):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(slow(x), y))
            optimizer.step()
            if step.round is not None:
                found.append(tuple(note.busy_seconds for note in step.round.notes))
    return found


def test_time_that_a_site_waits_is_nobodys_work(pool: Pool) -> None:
    for notes in pool.run(3, busy_in_sites)[0]:
        assert all(busy > 0.02 for busy in notes)  # four steps of about 8 milliseconds
        assert notes[0] < min(notes[1:])


class Kept:
    """Keeps events."""

    def __init__(self) -> None:
        self.steps: list[StepDone] = []

    def record(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.steps.append(event)

    def close(self) -> None:
        pass


def with_pauses(kind: str) -> list[StepDone]:
    """Something takes 0.1 seconds after every second step: an evaluation of one's own, a consensus, a checkpoint."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Kept()
    role = sync.LocalSGD(4) if kind == "consensus" else None
    with pl.Run(model, optimizer, data(LENGTH), batch=BATCH, sync=role, record=[kept]) as run:
        slow = Slow(model, 0.001)
        for step in run.steps(steps=8):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(slow(x), y))
            optimizer.step()
            if step.index % 2 == 0:
                with run.consensus() if kind == "consensus" else contextlib.nullcontext():
                    time.sleep(0.1)
    return kept.steps


def efficiencies(steps: Sequence[StepDone]) -> list[float]:
    """Of most steps: it is not known of one that a busy machine let some worker begin later than rank 0."""
    known = [step.efficiency for step in steps if step.efficiency is not None]
    assert len(known) > len(steps) / 2
    return known


@pytest.mark.parametrize("kind", ["own", "consensus"])
def test_efficiency_is_a_part_of_one(pool: Pool, kind: str) -> None:
    steps, _ = pool.run(2, with_pauses, kind)
    assert all(0.0 < each <= 1.05 for each in efficiencies(steps))


def busy_beside_a_consensus() -> list[float]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with pl.Run(model, optimizer, data(LENGTH), batch=BATCH, sync=sync.LocalSGD(4)) as run:
        for step in run.steps(steps=8):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if step.round is not None:
                found += [note.busy_seconds for note in step.round.notes]
            elif step.index % 4 == 1:
                with run.consensus():
                    time.sleep(2.0)
    return found


def test_a_consensus_is_nobodys_work(pool: Pool) -> None:
    assert max(pool.run(2, busy_beside_a_consensus)[0]) < 2.0
