"""Every epoch visits every example exactly once, for every order, plan, share, batch trajectory and loader."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

import paceline as pl
from paceline.feed import Feed, Loading
from paceline.planner import Cursor, advance, cut
from paceline.records import Plan, Progress
from paceline.roles import Order
from tests.pool import Pool
from tests.problems import Numbered

ORDERS: list[Order] = [
    pl.order.Shuffle(),
    pl.order.ShuffleOnce(),
    pl.order.Sequential(),
    pl.order.FlipFlop(),
    pl.order.ShuffleBlocks(7),
]


class NotForeseen(pl.order.Shuffle):
    """An order that is known only when its epoch begins."""

    foresees = False


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    workers = draw(st.integers(1, 5))
    local = draw(st.booleans())
    lengths = (
        draw(st.lists(st.integers(1, 40), min_size=workers, max_size=workers)) if local else [draw(st.integers(1, 60))]
    )
    return {
        "workers": workers,
        "lengths": tuple(lengths),
        "batches": draw(st.lists(st.integers(workers, 30), min_size=1, max_size=6)),
        "weights": draw(
            st.lists(st.lists(st.integers(0, 9), min_size=workers, max_size=workers), min_size=1, max_size=4)
        ),
        "micro": draw(st.none() | st.integers(1, 9)),
        "order": draw(st.sampled_from([*ORDERS, NotForeseen()])),
    }


def splitter(weights: Sequence[int]) -> Any:
    """Shares in proportion to weights that mean nothing; whole, and adding up."""

    def split(batch: int, workers: int) -> list[int]:
        total = sum(weights) or 1
        shares = [batch * weight // total for weight in weights]
        shares[0] += batch - sum(shares)
        return shares

    return split


def plans(situation: dict[str, Any], epochs: int) -> Iterator[tuple[Cursor, Plan]]:
    """A trajectory in which the batch and the shares change at every step."""
    lengths = situation["lengths"]
    cursor = Cursor(Progress(), (0,) * len(lengths))
    batches, weights = itertools.cycle(situation["batches"]), itertools.cycle(situation["weights"])
    while cursor.progress.epoch < epochs:
        plan = cut(
            cursor, lengths, situation["workers"], next(batches), splitter(next(weights)), situation["micro"], left=None
        )
        yield cursor, plan
        cursor = advance(cursor, plan, lengths)


def guesses(situation: dict[str, Any], cursor: Cursor, plan: Plan) -> Iterator[Plan]:
    """What would follow if the present batch and shares stayed: mostly wrong, as the next step changes both."""
    for _ in range(8):
        cursor = advance(cursor, plan, situation["lengths"])
        plan = cut(
            cursor,
            situation["lengths"],
            situation["workers"],
            max(plan.batch, 5),
            splitter([1] * situation["workers"]),
            situation["micro"],
            None,
        )
        yield plan


def feeds(situation: dict[str, Any], tensors: bool, num_workers: int = 0, prefetch: int | None = None) -> list[Feed]:
    lengths = situation["lengths"]
    local = len(lengths) > 1
    made = []
    for rank in range(situation["workers"]):
        length = lengths[rank] if local else lengths[0]
        dataset: Dataset[Any] = TensorDataset(torch.arange(float(length))[:, None]) if tensors else Numbered(length)
        loading = Loading(num_workers=num_workers, prefetch=prefetch, deadline=30.0)
        made.append(Feed(dataset, situation["order"], rank, 11, torch.device("cpu"), loading))
    return made


def check_coverage(situation: dict[str, Any], workers_feeds: list[Feed], epochs: int = 2) -> None:
    lengths, local = situation["lengths"], len(situation["lengths"]) > 1
    seen: dict[tuple[int, int], list[int]] = {}
    for cursor, plan in plans(situation, epochs):
        for rank, feed in enumerate(workers_feeds):
            taken = 0
            for examples, batch in feed.micro_batches(plan, lambda c=cursor, p=plan: guesses(situation, c, p)):  # type: ignore[misc]
                values = (batch[0] if isinstance(batch, list) else batch).reshape(-1).int().tolist()
                assert len(values) == examples
                assert 1 <= examples <= (situation["micro"] or 10**9)
                seen.setdefault((plan.epoch, rank if local else 0), []).extend(values)
                taken += examples
            assert taken == plan.counts[rank]
    for epoch in range(epochs):
        for stream, length in enumerate(lengths):
            assert sorted(seen[epoch, stream]) == list(range(length))


@settings(max_examples=150, deadline=None)
@given(situations())
def test_tensors(situation: dict[str, Any]) -> None:
    check_coverage(situation, feeds(situation, tensors=True))


@settings(max_examples=40, deadline=None)
@given(situations())
def test_any_dataset(situation: dict[str, Any]) -> None:
    check_coverage(situation, feeds(situation, tensors=False))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(situations(), st.integers(1, 2), st.integers(1, 3))
def test_loader_processes_that_guess_wrong(situation: dict[str, Any], num_workers: int, prefetch: int) -> None:
    situation = {**situation, "workers": min(situation["workers"], 2)}
    situation["lengths"] = situation["lengths"][: situation["workers"]]
    situation["weights"] = [each[:2] if situation["workers"] == 2 else each[:1] for each in situation["weights"]]
    situation["batches"] = [max(size, 2) for size in situation["batches"]]
    made = feeds(situation, tensors=False, num_workers=num_workers, prefetch=prefetch)
    try:
        check_coverage(situation, made)
    finally:
        for feed in made:
            feed.close()


def test_loader_uses_what_it_fetched_ahead() -> None:
    """With plans that come as foreseen, nothing is fetched twice."""
    situation = {"workers": 1, "lengths": (40,), "batches": [8], "weights": [[1]], "micro": 4, "order": ORDERS[0]}
    (feed,) = feeds(situation, tensors=False, num_workers=1, prefetch=2)
    asked: list[Any] = []
    source: Any = feed._source
    following = source._next_key

    def counted() -> list[int]:
        asked.append(following())
        return asked[-1]  # type: ignore[no-any-return]

    source._loader.batch_sampler._next_key = counted

    def exact(cursor: Cursor, plan: Plan) -> Iterator[Plan]:
        return (p for c, p in plans(situation, 2) if c.progress.step > cursor.progress.step)

    used = 0
    for cursor, plan in plans(situation, 2):
        used += len(list(feed.micro_batches(plan, lambda c=cursor, p=plan: exact(c, p))))  # type: ignore[misc]
    feed.close()
    fetched = [key for key in asked if key]
    assert len(fetched) == used == 20


class Logged(Numbered):
    """Writes down every example that is fetched."""

    def __init__(self, length: int, log: Path) -> None:
        super().__init__(length)
        self.log = log

    def __getitem__(self, at: int) -> torch.Tensor:
        with self.log.open("a") as log:
            log.write(f"{at}\n")
        return super().__getitem__(at)


def test_a_run_with_loaders_fetches_nothing_in_vain(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dataset = Logged(37, tmp_path / "log")
    with pl.Run(model, optimizer, dataset, batch=8, micro=3, num_workers=2, prefetch=3) as run:
        for step in run.steps(epochs=3):
            optimizer.zero_grad()
            for x in step:
                step.backward(model(x).mean())
            optimizer.step()
    fetched = [int(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(fetched) == sorted([*range(37)] * 3)


class Noisy(Dataset[Any]):
    """Random augmentation with all three generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> torch.Tensor:
        import random

        import numpy as np

        return torch.tensor([at + torch.rand(()).item(), random.random(), float(np.random.rand())])


def augmented(num_workers: int, micro: int, subset: bool, local: bool) -> list[list[float]]:
    model = torch.nn.Linear(3, 1)
    rows: list[list[float]] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dataset: Dataset[Any] = Subset(Noisy(), range(12)) if subset else Noisy()
    with pl.Run(model, optimizer, dataset, batch=4, micro=micro, num_workers=num_workers, local_data=local) as run:
        before = torch.get_rng_state()
        for step in run.steps(epochs=2):
            optimizer.zero_grad()
            for x in step:
                rows += x.tolist()
                step.backward(model(x).mean())
            optimizer.step()
        assert torch.equal(before, torch.get_rng_state())  # the training process keeps its own random state
    return rows


def test_augmentation_depends_on_the_example_alone(pool: Pool) -> None:
    (alone,) = pool.run(1, augmented, 0, 4, False, False)
    assert len({row[0] for row in alone}) == 24  # other random numbers in the second epoch
    for workers, num_workers, micro, subset in [(1, 2, 3, False), (2, 0, 1, False), (1, 0, 3, True)]:
        rows = itertools.chain(*pool.run(workers, augmented, num_workers, micro, subset, False))
        assert sorted(rows) == sorted(alone)


def test_own_streams_differ(pool: Pool) -> None:
    """Workers with equal data of their own go through it in different orders, with different augmentation."""
    first, second = pool.run(2, augmented, 0, 4, False, True)
    assert [int(row[0]) for row in first] != [int(row[0]) for row in second]
    assert not {row[1] for row in first} & {row[1] for row in second}


class Flaky(Numbered):
    """The loader process raises once for example 5."""

    def __init__(self, length: int, mark: Path) -> None:
        super().__init__(length)
        self.mark = mark

    def __getitem__(self, at: int) -> torch.Tensor:
        if at == 5 and not self.mark.exists():
            self.mark.touch()
            raise OSError("a passing trouble")
        return super().__getitem__(at)


def test_a_loader_that_raised_once_gives_the_right_examples_afterwards(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen: list[int] = []
    dataset = Flaky(24, tmp_path / "raised")
    with pl.Run(model, optimizer, dataset, batch=4, order=pl.order.Sequential(), num_workers=1) as run:
        for attempt in range(2):
            try:
                for step in run.steps(epochs=1):
                    optimizer.zero_grad()
                    for x in step:
                        step.backward(model(x).mean())
                        seen += x.reshape(-1).int().tolist()
                    optimizer.step()
            except OSError:
                assert attempt == 0
    assert seen == list(range(24))


@pytest.mark.parametrize("workers", [2, 3])
def test_own_streams(pool: Pool, workers: int) -> None:
    """Data that lives on the workers: each visits its own examples once per epoch, and weights are by examples."""
    found = pool.run(workers, own_stream)
    for rank, (values, weight) in enumerate(found):
        assert sorted(values) == sorted([float(100 * rank + at) for at in range(5 + 4 * rank)] * 2)
        # Gradient of w * x is the mean of x over the whole batch: w ends at minus the sum of batch means.
        assert weight == pytest.approx(found[0][1])


def own_stream() -> tuple[list[float], float]:
    import os

    rank = int(os.environ["RANK"])
    mine = TensorDataset(torch.arange(5.0 + 4 * rank)[:, None] + 100 * rank)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    values: list[float] = []
    with pl.Run(model, optimizer, mine, batch=6, local_data=True) as run:
        for step in run.steps(epochs=2):
            optimizer.zero_grad()
            for (x,) in step:
                values += x.reshape(-1).tolist()
                step.backward(model(x).mean())
            optimizer.step()
    return values, model.weight.item()
