"""What Gossip refuses, and what it does in a run of real processes."""

from __future__ import annotations

import math
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

import paceline as pl
from paceline import gossip, sync
from paceline.events import Ended, Event, Gossiped, Remark, StepDone
from paceline.gossip import start
from paceline.gossip.counts import Counts
from paceline.gossip.sockets import Sockets
from paceline.records import Progress
from paceline.sync.own_rounds import OwnRounds
from tests.pool import Pool, RemoteError
from tests.problems import data, flat, mlp, train


class Kept:
    """A recorder that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def make(role: sync.Gossip, **settings: Any) -> pl.Run:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return pl.Run(model, optimizer, data(80), **{"batch": 8, "sync": role, "deadline": 20.0, **settings})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"every": 0}, r"every \(0\) must be whole numbers of at least 1"),
        ({"every": sync.Geometric(0.5)}, r"its mean must be at least 1 step"),
        ({"every": sync.Geometric(math.inf)}, r"its mean must be at least 1 step"),
        ({"every": sync.WhileNear(1, 5.0)}, r"its steps must be at least 2, or there is nothing to shorten"),
        ({"every": sync.WhileNear(8, 0.0)}, r"its times must be a positive number"),
        ({"every": sync.Seconds(0)}, r"must be a positive number of seconds"),
        (
            {"codec": pl.codec.Half()},
            r"codec \(Half\(\)\) must be Lattice or Identity under Gossip: both partners have",
        ),
        ({"codec": pl.codec.Lattice}, r"must be Lattice or Identity"),
        ({"graph": "ring"}, r"graph \('ring'\) must be a graph, such as gossip.Complete\(\)"),
        ({"graph": gossip.Ring}, r"must be a graph"),
        ({"optimizer_state": sync.Reset()}, r"optimizer_state \(Reset\(\)\) must be Keep\(\) or Average\(\)"),
        ({"bind": "0.0.0.0"}, r"no address that others could reach"),
        ({"bind": "tcp://here"}, r"must be HOST or HOST:PORT"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(pl.SettingError, match=says):
        sync.Gossip(**{"every": 2, **settings})


def test_local_sgd_has_no_chances_of_its_own() -> None:
    with pytest.raises(pl.SettingError, match=r"every \(Geometric\(mean=4\)\) must be a whole number of steps"):
        sync.LocalSGD(sync.Geometric(4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"batch": pl.batch.NormTest(start=8, limit=16, eta=0.5)},
            r"batch=NormTest.* learns from what all workers did",
        ),
        ({"balance": pl.balance.BySpeed()}, r"balance=BySpeed.* under Gossip they never come together"),
        ({"lr": pl.lr.AdaScale(8)}, r"lr=AdaScale.* learns from what all workers did"),
        ({}, r"Gossip needs at least two workers; start more"),
    ],
)
def test_what_cannot_be_combined(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(pl.SettingError, match=says):
        make(sync.Gossip(2), **settings)


def test_chances_have_the_mean_and_no_memory() -> None:
    rounds = OwnRounds(sync.Geometric(4), number=3)
    lengths, at = [], 0
    for _ in range(4000):
        rounds.begin(Progress(at))
        length = next(n for n in range(1, 1000) if rounds.over(Progress(at + n)))
        lengths.append(length)
        at += length
    drawn = torch.tensor(lengths).double()
    assert abs(float(drawn.mean()) - 4) < 4 * (12 / 4000) ** 0.5  # its variance is mean (mean - 1)
    longer = drawn[drawn > 3] - 3
    assert abs(float(longer.mean()) - 4) < 4 * (12 / len(longer)) ** 0.5
    other = OwnRounds(sync.Geometric(4), number=4)
    assert [other.over(Progress(n)) for n in range(1, 9)] != [n >= lengths[0] for n in range(1, 9)]


def test_a_mean_of_one_is_every_step() -> None:
    rounds = OwnRounds(sync.Geometric(1), number=0)
    assert rounds.over(Progress(1))


def test_rounds_are_shorter_while_models_are_far_from_each_other() -> None:
    rounds, at, lengths = OwnRounds(sync.WhileNear(8, times=10.0), number=0), 0, []
    for distance in (None, 5.0, 30.0, 30.0, 30.0, 30.0, None, 20.0, 19.0, 5.0, 5.0):
        length = next(n for n in range(1, 100) if rounds.over(Progress(at + n)))
        lengths.append(length)
        at += length
        rounds.learn(distance, stride=2.0)
        rounds.begin(Progress(at))
    assert lengths == [8, 8, 8, 4, 2, 1, 1, 1, 2, 4, 8]
    other = OwnRounds(sync.WhileNear(8, times=10.0), number=0)
    other.load_state_dict(rounds.state_dict())
    other.enter(Progress(at))
    assert [other.over(Progress(at + n)) for n in (7, 8)] == [False, True]


def test_a_round_without_a_step_changes_nothing() -> None:
    """A scaler skips the first steps as a rule: how far one goes is not known then."""
    assert sync.WhileNear(8, times=10.0).after(4, distance=5.0, stride=0.0) == 4


def strides() -> tuple[list[float], list[float], float | None]:
    """How far the model went in each step, as measured, and as it is by the gradients; and how far partners were."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    role = sync.Gossip(sync.WhileNear(4, times=1e9))
    measured, expected = [], []
    with pl.Run(model, optimizer, data(160), batch=8, sync=role, deadline=30.0) as run:

        def each(step: pl.Step) -> None:
            gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
            measured.append(role.swarm.stride)
            expected.append(0.1 * float(gradient.norm()))
            time.sleep(0.005)
            if role.swarm._node.clerk.counts.exchanges >= 3:
                run.stop()

        train(run, model, each=each, steps=10**9)
        role.swarm._near = Counts()
        return measured, expected, role.swarm.distance()


def test_how_far_a_step_goes_is_measured_without_what_came_of_exchanges(pool: Pool) -> None:
    for measured, expected, distance in pool.run(2, strides):
        assert measured == pytest.approx(expected, rel=1e-3)
        assert distance is not None
        assert distance > 0


def refused(kind: str) -> str:
    model: nn.Module = mlp(dtype=torch.float64 if kind == "wide" else torch.float32)
    if kind == "wrapped":
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
    graph = gossip.Edges(((0, 1), (2, 3))) if kind == "in two parts" else gossip.Complete()
    bind = os.environ["TAKEN"] if kind == "taken" and os.environ["RANK"] == "1" else "127.0.0.1"
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    role = sync.Gossip(2, graph=graph, bind=bind)
    if kind in ("Adam", "AdamW"):
        optimizer = getattr(torch.optim, kind)(model.parameters())
        role = sync.Gossip(2, optimizer_state=sync.Average())
    try:
        pl.Run(model, optimizer, data(40), batch=8, sync=role, deadline=20.0)
    except pl.PacelineError as error:
        return f"{type(error).__name__}: {error}"
    return "made"


@pytest.mark.parametrize(
    ("kind", "size", "says"),
    [
        ("wide", 2, "SettingError: Gossip sends numbers as float32, and 0.weight would lose digits"),
        ("wrapped", 2, "SettingError: DistributedDataParallel averages gradients in every step, which Gossip"),
        ("Adam", 2, "SettingError: optimizer_state=Average() with Adam needs full precision, and codec (Lattice("),
        ("AdamW", 2, "as coarsely as parameters; use codec=Identity(), or Keep()"),
        ("in two parts", 4, "does not connect all members: it falls into [[0, 1], [2, 3]]"),
    ],
)
def test_runs_that_cannot_begin(pool: Pool, kind: str, size: int, says: str) -> None:
    for found in pool.run(size, refused, kind):
        assert says in found


def set_taken(address: str) -> None:
    os.environ["TAKEN"] = address


def test_a_port_in_use_on_one_worker_is_everybodys_error(pool: Pool) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        pool.run(2, set_taken, f"127.0.0.1:{taken.getsockname()[1]}")
        first, second = pool.run(2, refused, "taken")
    assert "SettingError: gossip cannot listen at 127.0.0.1" in second
    assert "WorkerLost" in first
    assert "rank 1 raised SettingError: gossip cannot listen" in first


def normed() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def whole_run(role: sync.Gossip, local_data: bool = False, sgd: bool = False) -> tuple[str, Progress, list[Event], int]:
    model = normed()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    kept, used = Kept(), 0
    with pl.Run(
        model, optimizer, data(160), batch=16, sync=role, record=[kept], deadline=30.0, local_data=local_data
    ) as run:
        for step in run.steps(epochs=4 if local_data else 10**6):
            optimizer.zero_grad()
            for x, y in step:
                used += len(x)
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            time.sleep(0.002)
            seen = [event.exchanges for event in kept.events if isinstance(event, Gossiped)]
            if run.fleet.rank == 0 and not local_data and sum(seen) >= 5 and run.progress.examples >= 640:
                run.stop()
        digest = run.replica.digest()
    return digest, run.progress, kept.events, used


ROLES = {
    "steps": lambda: sync.Gossip(2),
    "by chance": lambda: sync.Gossip(sync.Geometric(3), codec=pl.codec.Identity(), plain=True),
    "seconds": lambda: sync.Gossip(sync.Seconds(0.02), graph=gossip.Ring(), codec=pl.codec.Lattice(4)),
    "blocking": lambda: sync.Gossip(3, blocking=True, graph=gossip.RandomRegular(2)),
    "AD-PSGD": lambda: pl.recipes.ad_psgd(),
    "momentum": lambda: sync.Gossip(2, optimizer_state=sync.Average()),
    "moments": lambda: sync.Gossip(2, codec=pl.codec.Identity(), optimizer_state=sync.Average()),
}


def run_of(kind: str, local_data: bool = False) -> tuple[str, Progress, list[Event], int]:
    return whole_run(ROLES[kind](), local_data, sgd=kind == "momentum")


@pytest.mark.parametrize(
    ("kind", "size"),
    [("steps", 4), ("by chance", 3), ("seconds", 3), ("blocking", 3), ("momentum", 2), ("moments", 2)],
)
def test_all_come_to_the_end_with_the_same_model(pool: Pool, kind: str, size: int) -> None:
    found = pool.run(size, run_of, kind)
    assert len({digest for digest, _, _, _ in found}) == 1  # buffers included
    used = sum(each for _, _, _, each in found)
    for _, progress, _, _ in found:
        assert 640 <= progress.examples <= used  # who has not heard of the others' last steps goes on a little longer
        assert progress.epoch == progress.examples // 160
    events = found[0][2]
    seen = [event for event in events if isinstance(event, Gossiped)]
    assert sum(event.exchanges for event in seen) >= 5  # rank 0 has stopped all then
    assert sum(event.bytes_sent for event in seen) > 0
    assert sum(event.unheard for event in seen) == 0
    assert {event.bits for event in seen if event.bits} <= {4.0, 8.0, 16.0, 32.0} or kind in (
        "steps",
        "seconds",
        "momentum",
    )
    assert max(event.members for event in seen) == size
    assert any(event.distance for event in seen)
    told = [event.text for event in events if isinstance(event, Remark)]
    assert [one.endswith("is computed by numba") for one in told] == (
        [] if kind in ("by chance", "AD-PSGD", "moments") else [True]
    )
    ended = events[-1]
    assert isinstance(ended, Ended)
    assert ended.reason == "stopped"
    steps = [event for event in events if isinstance(event, StepDone)]
    assert sum(sum(event.counts) for event in steps) == found[0][3]


def test_workers_may_have_data_of_their_own(pool: Pool) -> None:
    found = pool.run(2, run_of, "steps", True)
    assert len({digest for digest, _, _, _ in found}) == 1
    assert all(progress.examples >= 4 * 320 for _, progress, _, _ in found)


def recomputed() -> tuple[str, str]:
    """The digests of the final model, and of the one whose statistics were computed anew."""
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.Run(model, optimizer, data(160), batch=16, sync=sync.Gossip(2), deadline=30.0) as run:
        train(run, model, steps=10)
        averaged = run.replica.digest()
        update_bn(DataLoader(data(160), batch_size=40), model)
        return averaged, run.replica.digest()


def test_statistics_can_be_computed_anew_at_the_end(pool: Pool) -> None:
    """From the same examples on all workers, so that all have the same."""
    first, second = pool.run(2, recomputed)
    assert first == second
    assert first[0] != first[1]


def with_consensus() -> tuple[list[float], bool, str]:
    """How far the average is from the own model, whether the own came back, and the last event's spread."""
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    away, back, kept = [], True, Kept()
    with pl.Run(model, optimizer, data(160), batch=8, sync=sync.Gossip(1000), record=[kept], deadline=30.0) as run:
        for step in run.steps(steps=40):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if step.index % 10 == 5:
                own = flat(model)
                with run.consensus():
                    away.append(float((flat(model) - own).norm()))
                back = back and torch.equal(own, flat(model))
            time.sleep(0.005)
        with run.consensus():
            away.append(float((flat(model) - flat(model)).norm()))
        spreads = [event.spread for event in kept.events if isinstance(event, Gossiped)]
        return away, back, str([spread for spread in spreads if spread])


def test_the_average_at_any_time(pool: Pool) -> None:
    """No worker waits for another to ask, too."""
    found = pool.run(3, with_consensus)
    for away, back, _ in found:
        assert back
        assert away[0] > 0
    assert found[0][2] != "[]"


def one_leaves(how: str) -> tuple[str, int, Tensor]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    culprit = os.environ["RANK"] == "1"
    with pl.Run(model, optimizer, data(160), batch=12, sync=sync.Gossip(2), deadline=20.0) as run:
        try:
            for step in run.steps(examples=1200):
                optimizer.zero_grad()
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                time.sleep(0.002)
                if culprit and step.index == 9:
                    if how == "break":
                        break
                    if how == "stop":
                        run.stop()
                    if how == "error":
                        raise ValueError("a bad example")
        except ValueError:
            return "error", run.progress.step, flat(model)
        if culprit and how == "break":
            after = flat(model)
            time.sleep(0.3)
            assert torch.equal(after, flat(model))
            return "left", run.progress.step, after
        return run.replica.digest(), run.progress.examples, flat(model)


@pytest.mark.parametrize("how", ["break", "error"])
def test_who_leaves_is_not_waited_for(pool: Pool, how: str) -> None:
    first, culprit, third = pool.run(3, one_leaves, how)
    assert culprit[:2] == ("left" if how == "break" else "error", 10)
    assert first[0] == third[0]
    assert min(first[1], third[1]) >= 1200


def test_one_that_stops_stops_all(pool: Pool) -> None:
    found = pool.run(3, one_leaves, "stop")
    assert len({digest for digest, _, _ in found}) == 1
    assert max(examples for _, examples, _ in found) < 1200


def afterwards(what: str) -> None:
    with make(sync.Gossip(2)) as run:
        train(run, run.model, steps=3)
        if what == "resume":
            run.resume("nowhere")
        if what == "steps":
            train(run, run.model, steps=6)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("resume", "gone their own ways"),
        ("steps", "the swarm has come to the end that all agreed on"),
    ],
)
def test_what_cannot_be_done_afterwards(pool: Pool, what: str, says: str) -> None:
    for outcome in pool.outcomes(2, afterwards, what):
        assert isinstance(outcome, RemoteError)
        assert says in outcome.text


def thawed() -> None:
    model = mlp()
    first = next(model.parameters())
    first.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.Run(model, optimizer, data(80), batch=8, sync=sync.Gossip(2), deadline=20.0) as run:

        def thaw(step: pl.Step) -> None:
            if step.index == 2:
                first.requires_grad_(True)

        train(run, model, each=thaw, steps=10)


def test_what_is_thawed_later_is_refused(pool: Pool) -> None:
    found = [outcome for outcome in pool.outcomes(2, thawed) if isinstance(outcome, RemoteError)]
    assert any("0.weight was frozen when the run began, and is trained now" in outcome.text for outcome in found)


def one_breaks() -> str:
    """Rank 1 leaves its loop, and stays in the run for as long as the others train."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.Run(model, optimizer, data(160), batch=12, sync=sync.Gossip(2), deadline=20.0) as run:
        for step in run.steps(steps=40):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            time.sleep(0.01)
            if run.fleet.rank == 1 and step.index == 4:
                break
        if run.fleet.rank == 1:
            time.sleep(6.0)
        return run.replica.digest()


def test_who_leaves_its_loop_is_not_waited_for_at_the_end(pool: Pool) -> None:
    first, second, third = pool.run(3, one_breaks)
    assert first == third  # without an error that the final model of the other did not come
    assert second != first


def masked() -> tuple[float, float, bool]:
    """A model with a mask, as transformers have it."""
    model = mlp()
    mask = torch.full((3, 3), -torch.inf).triu(1)
    model.register_buffer("mask", mask)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.Run(model, optimizer, data(160), batch=8, sync=sync.Gossip(2), deadline=20.0) as run:
        for step in run.steps(steps=10):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if step.index == 5:
                with run.consensus():
                    middle = float(flat(model).abs().sum())
    return middle, float(flat(model).abs().sum()), torch.equal(model.get_buffer("mask"), mask)


def test_an_infinite_buffer_does_not_spoil_the_model(pool: Pool) -> None:
    for middle, end, kept in pool.run(2, masked):
        assert middle > 1
        assert end > 1
        assert kept


def cannot_be_reached() -> None:
    """Rank 1 says that it listens where nobody does."""
    if os.environ["RANK"] == "1":
        usual = Sockets._bind
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sockets, "_bind", lambda self, host, port: (usual(self, host, port), "tcp://127.0.0.1:9")[1])
            make(sync.Gossip(2), deadline=3.0).close()
    else:
        make(sync.Gossip(2), deadline=3.0).close()


def test_who_cannot_be_reached_is_an_error_before_the_training(pool: Pool) -> None:
    says = r"member 1 waited 3 s for an answer of member 0 at tcp://127\.0\.0\.1:\d+; give Gossip\(bind=\) an address"
    for outcome in pool.outcomes(2, cannot_be_reached):
        assert isinstance(outcome, RemoteError)
        assert re.search(says, outcome.text), outcome.text


def elsewhere() -> None:
    """Every rank is on a machine of its own, and listens to itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "loopback_of", lambda processes: f"machine {os.environ['RANK']}")
        make(sync.Gossip(2), deadline=30.0).close()


def test_a_loopback_address_of_another_machine_is_refused_at_once(pool: Pool) -> None:
    says = r"member 0 listens at tcp://127\.0\.0\.1:\d+, which member 1 on another machine cannot reach; give Gossip\("
    for outcome in pool.outcomes(2, elsewhere):
        assert isinstance(outcome, RemoteError)
        assert re.search(says, outcome.text), outcome.text


def test_a_loopback_address_has_a_machine(tmp_path: Path) -> None:
    assert start.loopback_of(tmp_path) == socket.gethostname()
    assert start.loopback_of(Path("/proc")) == start.loopback_of(Path("/proc"))
