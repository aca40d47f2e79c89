"""Local SGD on two levels is a loop that anybody could write; whoever leaves, breaks or resumes, all end alike."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import paceline as pl
from paceline import codec, sync
from paceline.sync.sites import SITE
from tests.pool import Pool, RemoteError
from tests.problems import data, flat, mlp, train

LENGTH = 61  # prime: every epoch ends with a ragged step
BATCH = 12
WIDE = 20  # with it, four workers have two examples or more: BatchNorm refuses one
DEADLINE = 10.0  # seconds: a worker that waits in vain is an error, not a hang


@dataclass(frozen=True)
class Changing:
    """Unequal shares that are others in every kind of step; with few examples left, the first workers have none."""

    def split(self, batch: int, workers: int) -> Sequence[int]:
        if batch < 3 * workers:
            return [0] * (workers - 1) + [batch]
        shares = [batch * (rank + 1) // (workers * (workers + 1) // 2) for rank in range(workers)]
        shares[-1] += batch - sum(shares)
        return shares


@dataclass(frozen=True)
class Batches:
    """Two sizes in turns: with them, the shares of the workers of a site are not the same in all its rounds."""

    small: int = BATCH
    large: int = 20

    def size(self, progress: pl.Progress) -> int:
        return self.small if progress.step % 3 else self.large


@dataclass(frozen=True)
class TwoLevels:
    """Makes the role in the worker. ``sites`` has a letter for each rank: "aab" is a site of two and one of one."""

    sites: str
    inside: Any = 2
    between: Any = 4
    optimizer_state: Any = sync.Keep()  # noqa: RUF009
    outer: bool = False
    coded: bool = False

    def __call__(self, rank: int) -> sync.Hierarchical:
        return sync.Hierarchical(
            self.inside,
            self.between,
            site=self.sites[rank],
            optimizer_state=self.optimizer_state,
            outer=sync.DiLoCo(0.7, 0.9) if self.outer else None,
            codec=codec.Uniform8() if self.coded else None,
        )

    @property
    def size(self) -> int:
        return len(self.sites)


def numbers() -> TensorDataset:
    x, y = data(LENGTH).tensors
    return TensorDataset(x.double(), y)


def with_batch_norm(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def rank() -> int:
    return int(os.environ["RANK"])


def trained(two: TwoLevels | None, momentum: float, goal: dict[str, Any]) -> tuple[Tensor, str]:
    model = mlp(dtype=torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=momentum)
    role = two(rank()) if two else sync.AllReduce()
    with pl.Run(model, optimizer, numbers(), batch=Batches(), balance=Changing(), sync=role, deadline=DEADLINE) as run:
        train(run, model, **goal)
        return flat(model), run.replica.digest()


class ByHand:
    """All workers in one process, one after the other; weights are counted on each level apart."""

    def __init__(self, two: TwoLevels, momentum: float = 0.9) -> None:
        self.two, self.momentum = two, momentum
        self.models = [mlp(dtype=torch.float64) for _ in two.sites]
        self.optimizers = [SGD(model.parameters(), lr=0.1, momentum=momentum) for model in self.models]
        self.inside, self.between = [0] * two.size, [0] * two.size
        self.start = copy.deepcopy(self.models[0])
        self.outer = SGD(self.start.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def step(self, parts: Sequence[Tensor]) -> None:
        x, y = numbers().tensors
        for at, ids in enumerate(parts):
            if len(ids):
                self.optimizers[at].zero_grad()
                F.cross_entropy(self.models[at](x[ids]), y[ids]).backward()  # type: ignore[no-untyped-call]
                self.optimizers[at].step()
                self.inside[at] += len(ids)
                self.between[at] += len(ids)

    def average_in(self, site: str) -> None:
        members = [at for at, name in enumerate(self.two.sites) if name == site]
        self._average(members, [self.inside[at] for at in members])
        for at in members:
            self.inside[at] = 0
            if isinstance(self.two.optimizer_state, sync.Reset):
                self.optimizers[at] = SGD(self.models[at].parameters(), lr=0.1, momentum=self.momentum)

    def average_all(self) -> None:
        for site in dict.fromkeys(self.two.sites):
            self.average_in(site)
        sites = [sum(n for n, name in zip(self.between, self.two.sites, strict=True) if name == s) for s in "abc"]
        members = [self.two.sites.count(name) for name in self.two.sites]
        # Inside of a site all are equal now, so that each stands for its part of the site.
        everybody = list(range(self.two.size))
        self._average(everybody, [sites["abc".index(self.two.sites[at])] / members[at] for at in everybody])
        if self.two.outer:
            for first, mean in zip(self.start.parameters(), self.models[0].parameters(), strict=True):
                first.grad = first.detach() - mean.detach()
            self.outer.step()
            for model in self.models:
                model.load_state_dict(self.start.state_dict())
        self.between = [0] * self.two.size

    @torch.no_grad()
    def _average(self, members: Sequence[int], weights: Sequence[float]) -> None:
        if not sum(weights):
            return

        def equalise(tensors: Sequence[Tensor]) -> None:
            mean = torch.stack([n * each for n, each in zip(weights, tensors, strict=True)]).sum(0) / sum(weights)
            for each in tensors:
                each.copy_(mean)

        for parameters in zip(*(self.models[at].parameters() for at in members), strict=True):
            equalise(parameters)
        if isinstance(self.two.optimizer_state, sync.Average):
            for slot in range(len(list(self.models[0].parameters()))):
                states = [self.optimizers[at].state_dict()["state"][slot] for at in members]
                equalise([state["momentum_buffer"] for state in states])


def parts_of_steps(
    size: int,
    steps: int,
    length: int = LENGTH,
    batches: Batches = Batches(),  # noqa: B008 (it is immutable)
) -> Iterator[list[Tensor]]:
    """What every worker takes in each step."""
    done, epoch = 0, 0
    while True:
        order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch))
        at = 0
        while at < length:
            if done == steps:
                return
            ids = order[at : at + batches.size(pl.Progress(step=done))]
            yield list(torch.split(ids, list(Changing().split(len(ids), size))))
            at += len(ids)
            done += 1
        epoch += 1


def by_hand(two: TwoLevels, momentum: float, steps: int) -> Tensor:
    workers = ByHand(two, momentum)
    since = 0  # steps since the last average in the site
    for done, parts in enumerate(parts_of_steps(two.size, steps), 1):
        workers.step(parts)
        since += 1
        if done % two.between == 0 or done == steps:
            workers.average_all()
            since = 0
        elif since == two.inside:
            for site in dict.fromkeys(two.sites):
                workers.average_in(site)
            since = 0
    return flat(workers.models[0])


@pytest.mark.parametrize("sites", ["aab", "aabb", "abc", "abba"])
@pytest.mark.parametrize(
    ("state", "outer"),
    [(sync.Keep(), False), (sync.Average(), False), (sync.Reset(), False), (sync.Keep(), True)],
    ids=["keep", "average", "reset", "outer"],
)
def test_two_levels_are_what_one_would_write(pool: Pool, sites: str, state: Any, outer: bool) -> None:
    """Unequal shares that change, steps without examples, rounds of 2 in rounds of 5, and a last one that is not full.

    In double precision; what differs is the order of sums.
    """
    two = TwoLevels(sites, 2, 5, state, outer)
    found = pool.run(two.size, trained, two, 0.9, {"steps": 13})
    assert len({digest for _, digest in found}) == 1
    torch.testing.assert_close(found[0][0], by_hand(two, 0.9, 13), rtol=0, atol=1e-12)


@pytest.mark.parametrize("sites", ["aab", "abc"])
def test_one_step_on_each_level_with_sgd_is_all_reduce(pool: Pool, sites: str) -> None:
    """To the rounding of sums in another order."""
    found = pool.run(3, trained, TwoLevels(sites, 1, 1), 0.0, {"epochs": 3})
    expected = pool.run(3, trained, None, 0.0, {"epochs": 3})
    torch.testing.assert_close(found[0][0], expected[0][0], rtol=0, atol=1e-12)


def digests_of_all_lengths(two: TwoLevels) -> list[tuple[str, tuple[int, int]]]:
    found = []
    for steps in range(1, 10):
        model = with_batch_norm()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        with pl.Run(
            model, optimizer, data(100), batch=WIDE, balance=Changing(), sync=two(rank()), deadline=DEADLINE
        ) as run:
            train(run, model, steps=steps)
            found.append((run.replica.digest(), (run.progress.step, run.progress.examples)))
    return found


@pytest.mark.parametrize("coded", [False, True], ids=["plain", "coded"])
@pytest.mark.parametrize("sites", ["aab", "abb", "aabb"])
def test_all_end_with_the_same_bits_after_any_number_of_steps(pool: Pool, sites: str, coded: bool) -> None:
    """Parameters and the statistics of BatchNorm, also where averages between sites lose precision on the way."""
    found = pool.run(len(sites), digests_of_all_lengths, TwoLevels(sites, 2, 4, coded=coded))
    assert all(each == found[0] for each in found)
    assert [progress[0] for _, progress in found[0]] == list(range(1, 10))
    assert len({digest for digest, _ in found[0]}) == 9


def saved_and_resumed(
    folder: Path, two: TwoLevels, save_at: Sequence[int], resume_at: int | None, dtype: torch.dtype, steps: int
) -> tuple[str, int]:
    model = with_batch_norm(dtype)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    # No step is without examples for a worker: BatchNorm's count of batches is each worker's own.
    x, y = data(94).tensors
    dataset = TensorDataset(x.to(dtype), y)
    seen = 0
    with pl.Run(
        model, optimizer, dataset, batch=Batches(WIDE, 34), balance=Changing(), sync=two(rank()), deadline=DEADLINE
    ) as run:
        if resume_at is not None:
            assert run.resume(folder / f"{resume_at}.ckpt")

        def save(step: pl.Step) -> None:
            nonlocal seen
            seen += step.plan.counts[run.fleet.rank]
            if step.index + 1 in save_at:
                run.save(folder / f"{step.index + 1}.ckpt")

        train(run, model, each=save, steps=steps)
        return run.replica.digest(), seen


@pytest.mark.parametrize(
    ("two", "dtype"),
    [
        (TwoLevels("aab"), torch.float32),
        pytest.param(TwoLevels("abb", 2, 5), torch.float64, marks=pytest.mark.slow),
        pytest.param(TwoLevels("aabb", 1, 3, sync.Average()), torch.float32, marks=pytest.mark.slow),
        (TwoLevels("aab", 2, 4, outer=True, coded=True), torch.float32),
        (TwoLevels("abbb", sync.Examples(50), sync.PostLocal(3, 5), sync.Reset()), torch.float32),
    ],
    ids=["keep", "alone first", "average", "outer coded", "schedules"],
)
def test_resume_at_any_step_is_never_having_stopped(
    pool: Pool, tmp_path: Path, two: TwoLevels, dtype: torch.dtype
) -> None:
    """To the bit, and saving changes nothing."""
    never = pool.run(two.size, saved_and_resumed, tmp_path, two, [], None, dtype, 11)
    saved = pool.run(two.size, saved_and_resumed, tmp_path, two, range(1, 10), None, dtype, 11)
    assert len({digest for digest, _ in never}) == 1
    assert [digest for digest, _ in saved] == [digest for digest, _ in never]
    for at in range(1, 10):
        resumed = pool.run(two.size, saved_and_resumed, tmp_path, two, [], at, dtype, 11)
        assert [digest for digest, _ in resumed] == [digest for digest, _ in never], f"resumed after step {at}"


@pytest.mark.parametrize("after", ["a", "ab", "abb", "aba", "abc", "aabb"])
def test_other_workers_or_sites_go_on_from_the_average(pool: Pool, tmp_path: Path, after: str) -> None:
    """Saved in the middle of rounds of both levels by sites of two and one; all examples that are left are used."""
    before = TwoLevels("aab", 2, 5, outer=True, coded=True)
    pool.run(3, saved_and_resumed, tmp_path, before, [7, 8], None, torch.float32, 8)
    for at in (7, 8):
        two = TwoLevels(after, 2, 5, outer=True, coded=True)
        found = pool.run(len(after), saved_and_resumed, tmp_path, two, [], at, torch.float32, 12)
        assert len({digest for digest, _ in found}) == 1
        left = list(parts_of_steps(1, 12, 94, Batches(WIDE, 34)))[at:]
        assert sum(seen for _, seen in found) == sum(len(ids) for parts in left for ids in parts)


def looked_at_in_the_middle(two: TwoLevels, at: int) -> tuple[str, str, str, Tensor]:
    """Digests before, inside and after a consensus, and the model in it."""
    model = with_batch_norm(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = data(100).tensors
    dataset = TensorDataset(x.double(), y)
    found: list[tuple[str, str, str, Tensor]] = []
    with pl.Run(model, optimizer, dataset, batch=WIDE, balance=Changing(), sync=two(rank()), deadline=DEADLINE) as run:

        def look(step: pl.Step) -> None:
            if step.index + 1 == at:
                before = run.replica.digest()
                with run.consensus():
                    inside, mean = run.replica.digest(), flat(model)
                found.append((before, inside, run.replica.digest(), mean))

        train(run, model, each=look, steps=9)
    return found[0]


def ended(two: TwoLevels, steps: int) -> Tensor:
    model = with_batch_norm(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = data(100).tensors
    with pl.Run(
        model, optimizer, TensorDataset(x.double(), y), batch=WIDE, balance=Changing(), sync=two(rank())
    ) as run:
        train(run, model, steps=steps)
    return flat(model)


@pytest.mark.parametrize("at", [1, 2, 3, 6])
def test_consensus_is_where_an_end_here_would_lead_and_then_back(pool: Pool, at: int) -> None:
    """Shares are the same in every step here: so the weights since any average are in the same proportion."""
    two = TwoLevels("aab", 2, 5)
    found = pool.run(3, looked_at_in_the_middle, two, at)
    befores, insides, afters, means = zip(*found, strict=True)
    assert len(set(befores)) == (2 if at == 2 else 3)
    assert len(set(insides)) == 1
    assert befores == afters
    torch.testing.assert_close(means[0], pool.run(3, ended, two, at)[0], rtol=0, atol=1e-12)


BEFORE, AFTER = "before the optimizer", "after the optimizer"


def left_early(
    two: TwoLevels, cases: Sequence[dict[int, tuple[int, str]]], stops: dict[int, int], steps: int
) -> list[tuple[str, tuple[int, int], Tensor]]:
    """For each case, train; some workers leave the loop, or ask all to stop, at a step of their own."""
    found = []
    for leavers in cases:
        model = mlp(dtype=torch.float64)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        with pl.Run(
            model, optimizer, numbers(), batch=Batches(), balance=Changing(), sync=two(rank()), deadline=DEADLINE
        ) as run:
            at, phase = leavers.get(rank(), (-1, ""))
            for step in run.steps(steps=steps):
                optimizer.zero_grad()
                if stops.get(rank()) == step.index:
                    run.stop()
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
                if step.index == at and phase == BEFORE:
                    break
                optimizer.step()
                if step.index == at and phase == AFTER:
                    break
            found.append((run.replica.digest(), (run.progress.step, run.progress.examples), flat(model)))
    return found


def left_by_hand(two: TwoLevels, leavers: dict[int, tuple[int, str]], steps: int) -> tuple[int, Tensor]:
    """Who has left does nothing more; with the round between sites in which the first leaves, all end."""
    workers = ByHand(two)
    until = {at: leavers[at][0] + (leavers[at][1] == AFTER) if at in leavers else steps for at in range(two.size)}
    last = {site: max(until[at] for at, name in enumerate(two.sites) if name == site) for site in two.sites}
    end = max(until.values())
    # Who leaves just after an average is missed at the next one.
    first = min(until.values())
    end = min(end, (first // two.between + 1) * two.between)
    for done, parts in enumerate(parts_of_steps(two.size, end), 1):
        workers.step([ids if done <= until[at] else ids[:0] for at, ids in enumerate(parts)])
        if done % two.between == 0 or done == end:
            workers.average_all()
            continue
        for site, when in last.items():
            # The last of a site to leave averages in the site when it does.
            if (done % two.between) % two.inside == 0 or done == when:
                workers.average_in(site)
    return end, flat(workers.models[0])


def check_leaving(pool: Pool, two: TwoLevels, cases: Sequence[dict[int, tuple[int, str]]], steps: int) -> None:
    found = pool.run(two.size, left_early, two, cases, {}, steps)
    for number, leavers in enumerate(cases):
        ends = [each[number] for each in found]
        assert len({digest for digest, _, _ in ends}) == 1, leavers
        assert len({progress for _, progress, _ in ends}) == 1, leavers
        done, expected = left_by_hand(two, leavers, steps)
        assert ends[0][1][0] == done, leavers
        torch.testing.assert_close(ends[0][2], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("sites", ["aab", "abb"])
def test_a_worker_may_leave_at_any_phase(pool: Pool, sites: str, who: int) -> None:
    """All end with the same model, in which everybody's examples have their true weight on both levels."""
    cases = [{who: (at, phase)} for at, phase in product(range(9), (BEFORE, AFTER))]
    check_leaving(pool, TwoLevels(sites, 2, 4), cases, 9)


def test_several_may_leave(pool: Pool) -> None:
    cases = [
        {0: (2, AFTER), 1: (2, AFTER)},  # a whole site
        {0: (1, BEFORE), 1: (2, AFTER)},  # one after the other
        {1: (0, AFTER), 0: (3, BEFORE)},
        {2: (4, BEFORE), 3: (4, BEFORE)},
        {2: (2, AFTER), 3: (5, BEFORE)},
        {0: (1, AFTER), 2: (2, BEFORE)},  # one of each
        {1: (2, BEFORE), 3: (0, AFTER)},
        {0: (0, BEFORE), 3: (3, AFTER)},
        {0: (1, AFTER), 1: (2, AFTER), 2: (2, BEFORE)},  # all but one
        {0: (2, AFTER), 1: (2, AFTER), 2: (2, AFTER), 3: (2, AFTER)},  # everybody
        {0: (5, BEFORE), 1: (5, BEFORE), 2: (5, BEFORE), 3: (5, BEFORE)},
        {0: (0, AFTER), 1: (1, BEFORE), 2: (1, AFTER), 3: (2, AFTER)},
        {0: (3, AFTER), 1: (3, AFTER), 2: (3, AFTER), 3: (3, AFTER)},  # with the end of a round
        {0: (6, AFTER), 1: (6, AFTER), 2: (6, AFTER), 3: (6, AFTER)},  # with the last step
    ]
    check_leaving(pool, TwoLevels("aabb", 2, 4), cases, 7)


@pytest.mark.parametrize("stops", [{1: 0}, {1: 1}, {2: 0}, {0: 4, 2: 4}])
def test_one_leaves_while_another_asks_all_to_stop(pool: Pool, stops: dict[int, int]) -> None:
    """Who asks goes on to the end of the round, and so must the average in its site with the one that has left."""
    cases = [{0: (at, phase)} for at, phase in product(range(1, 6), (BEFORE, AFTER))]
    found = pool.run(3, left_early, TwoLevels("aab", 2, 4), cases, stops, 9)
    for number, leavers in enumerate(cases):
        ends = [each[number] for each in found]
        assert len({digest for digest, _, _ in ends}) == 1, leavers
        assert {progress[0] for _, progress, _ in ends} <= {4, 8}, leavers


@pytest.mark.parametrize("given", [False, True], ids=["inside", "between"])
def test_rounds_of_seconds_are_refused(given: bool) -> None:
    rounds: tuple[Any, Any] = (2, sync.Seconds(1.0)) if given else (sync.PostLocal(3, sync.Seconds(1.0)), 4)
    with pytest.raises(pl.SettingError, match="counts its rounds in steps or examples; Seconds is for LocalSGD"):
        sync.Hierarchical(*rounds)


def test_the_name_of_a_site_is_text() -> None:
    """A number is not: 0 would be the same as none."""
    with pytest.raises(pl.SettingError, match=r"site \(0\) must be the name of a site"):
        sync.Hierarchical(2, 4, site=0)  # type: ignore[arg-type]


def test_what_a_role_says_of_itself() -> None:
    """It is part of what workers compare and records keep."""
    role = sync.Hierarchical(2, sync.Examples(50), codec=codec.Uniform8())
    assert repr(role).startswith("Hierarchical(Steps(count=2), Examples(count=50), optimizer_state=Keep(), codec=Unif")


@contextmanager
def machine(host: str, site: str | None) -> Iterator[None]:
    """This worker's environment, as if it were another machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: host)
        patch.delenv(SITE, raising=False)
        if site is not None:
            patch.setenv(SITE, site)
        yield


def trained_on_machines(
    hosts: Sequence[str], variables: Sequence[str | None], given: Sequence[str | None]
) -> tuple[Tensor, str]:
    model = mlp(dtype=torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with machine(hosts[rank()], variables[rank()]):
        role = sync.Hierarchical(2, 5, site=given[rank()])
    with pl.Run(model, optimizer, numbers(), batch=Batches(), balance=Changing(), sync=role, deadline=DEADLINE) as run:
        train(run, model, steps=8)
        return flat(model), run.replica.digest()


NONE = (None, None, None)


@pytest.mark.parametrize(
    ("hosts", "variables", "given"),
    [
        (("one", "one", "two"), NONE, NONE),
        (("x", "y", "z"), ("one", "one", "two"), NONE),
        (("one", "two", "two"), ("", None, "one's"), (None, "one", None)),
        (("x", "x", "x"), ("y", "y", "y"), ("Zürich, Raum 1", "Zürich, Raum 1", "東京")),
    ],
    ids=["hosts", "variables", "mixed", "given"],
)
def test_where_the_name_of_a_site_is_found(pool: Pool, hosts: Any, variables: Any, given: Any) -> None:
    """What is given, else the variable, else the host's name; names may be any, and of any length."""
    found = pool.run(3, trained_on_machines, hosts, variables, given)
    assert len({digest for _, digest in found}) == 1
    torch.testing.assert_close(found[0][0], by_hand(TwoLevels("aab", 2, 5), 0.9, 8), rtol=0, atol=1e-12)


def test_one_site_is_refused(pool: Pool) -> None:
    for outcome in pool.outcomes(2, trained, TwoLevels("aa"), 0.9, {"steps": 2}):
        assert isinstance(outcome, RemoteError)
        assert outcome.kind == "SettingError"
        assert "all 2 workers are at the site 'a', so there is nothing between sites; give each" in outcome.text
        assert "(site=…, or the variable PACELINE_SITE), or use LocalSGD" in outcome.text


@pytest.mark.parametrize("coded", [False, True], ids=["plain", "coded"])
def test_one_process_is_plain_training(coded: bool) -> None:
    found = []
    for role in (sync.AllReduce(), TwoLevels("a", 2, 5, coded=coded)(0)):
        model = mlp(dtype=torch.float64)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        with pl.Run(model, optimizer, numbers(), batch=BATCH, sync=role) as run:
            train(run, model, steps=8)
        found.append(flat(model))
    assert torch.equal(*found)
