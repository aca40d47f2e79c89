from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline import record
from paceline.events import Ended, Event, Measured, Resumed, Saved, Started, StepDone
from tests.pool import Pool
from tests.problems import data, flat, mlp, train


class Memory:
    """A recorder that keeps everything."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def record(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1


def make(**settings: Any) -> pl.Run:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return pl.Run(model, optimizer, data(40), **{"batch": 8, **settings})


@pytest.mark.parametrize(
    ("goal", "steps", "examples"),
    [({"epochs": 2}, 10, 80), ({"steps": 7}, 7, 56), ({"examples": 45}, 6, 45), ({"examples": 0}, 0, 0)],
)
def test_goals_are_met_exactly(goal: dict[str, Any], steps: int, examples: int) -> None:
    with make() as run:
        train(run, run.model, **goal)
        assert (run.progress.step, run.progress.examples) == (steps, examples)
        with pytest.warns(UserWarning, match="has nothing to do"):
            train(run, run.model, **goal)  # counted from the beginning of the run: there already
        assert run.progress.step == steps


def test_ends_epoch_and_loss() -> None:
    ends: list[int] = []
    with make(batch=16) as run:

        def look(step: pl.Step) -> None:
            assert step.round is not None
            assert step.loss == pytest.approx(step.round.notes[0].loss / step.plan.batch)
            if step.ends_epoch:
                ends.append(step.index)

        train(run, run.model, epochs=2, each=look)
    assert ends == [2, 5]  # 16, 16, 8


def test_the_body_of_the_loop_sees_the_step_as_done() -> None:
    memory = Memory()
    with make(record=[memory]) as run:
        for step in run.steps(steps=3):
            assert run.progress.step == step.index
            run.optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(run.model(x), y))
            run.optimizer.step()
            assert run.progress.step == step.index + 1
            run.log(done=run.progress.step)
    logged = [(event.step, event.values["done"]) for event in memory.events if isinstance(event, Measured)]
    assert logged == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_an_error_in_a_step_is_the_reason_of_the_end() -> None:
    memory = Memory()
    run = make(record=[memory])
    with pytest.raises(pl.NonFiniteLoss), run:
        train(run, run.model, steps=3, loss=lambda out, y: F.cross_entropy(out, y) * float("nan"))
    assert [event.reason for event in memory.events if isinstance(event, Ended)] == ["NonFiniteLoss"]


def test_everything_is_given_back() -> None:
    run = make()
    with run:
        assert len(run.optimizer._optimizer_step_pre_hooks) == 1
        train(run, run.model, steps=1)
    assert not run.optimizer._optimizer_step_pre_hooks
    assert not run.optimizer._optimizer_step_post_hooks
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run.close()
    before = flat(run.model)
    run.model(torch.ones(2, 6)).sum().backward()
    run.optimizer.step()  # the optimizer is the user's again
    assert not torch.equal(before, flat(run.model))


def test_the_optimizer_may_be_used_outside_of_the_loop() -> None:
    with make() as run:
        run.model(torch.ones(2, 6)).sum().backward()
        run.optimizer.step()
        train(run, run.model, steps=2)
        assert run.progress.step == 2


def test_break_and_go_on() -> None:
    """A step that was applied counts; one that was only begun does not."""
    with make() as run:
        for step in run.steps(steps=10):
            run.optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(run.model(x), y))
            run.optimizer.step()
            if step.index == 3:
                break
        assert run.progress.step == 4
        for _ in run.steps(steps=10):
            break
        assert run.progress.step == 4
        train(run, run.model, steps=10)
        broken = flat(run.model)
    with make() as run:
        train(run, run.model, steps=10)
        assert torch.equal(broken, flat(run.model))


def break_then_be_slow() -> int:
    """All leave the loop at the same place; one needs longer than the others before it comes back."""
    with make(deadline=20) as run:
        for _ in range(2):
            goal = run.progress.step + 5
            for step in run.steps(steps=goal):
                run.optimizer.zero_grad()
                for x, y in step:
                    step.backward(F.cross_entropy(run.model(x), y))
                run.optimizer.step()
                if step.index == goal - 2:
                    break
            if run.fleet.rank == 0:
                threading.Event().wait(2.5)
        with run.consensus():
            return run.progress.step


def test_who_left_at_the_same_place_is_not_blamed(pool: Pool) -> None:
    assert pool.run(2, break_then_be_slow) == [8, 8]


def signalled_in_the_last_step(folder: Path) -> list[str]:
    with make(checkpoint=pl.Checkpoint(folder, every=1, keep=1)) as run:
        try:
            for step in run.steps(steps=4):
                run.optimizer.zero_grad()
                for x, y in step:
                    step.backward(F.cross_entropy(run.model(x), y))
                run.optimizer.step()
                if step.index == 3 and run.fleet.rank == 1:
                    signal.raise_signal(signal.SIGINT)
        except pl.Interrupted as interrupted:
            return [str(interrupted.code), *(path.name for path in sorted(folder.iterdir()))]
    return []


def test_a_signal_in_the_last_step_is_everybodys(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, signalled_in_the_last_step, tmp_path):
        assert found == ["130", "step-00000004.ckpt"]


def test_a_signal_before_a_break_is_not_lost() -> None:
    with make() as run:
        for _ in run.steps(steps=4):
            signal.raise_signal(signal.SIGINT)
            break
        with pytest.raises(KeyboardInterrupt):
            threading.Event().wait(10)  # it comes as soon as the loop has been left


def stop_wanted_by_one() -> int:
    with make() as run:
        for step in run.steps(steps=50):
            run.optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(run.model(x), y))
            run.optimizer.step()
            if step.index == 5 and run.fleet.rank == 1:
                run.stop()
        done = run.progress.step
        train(run, run.model, steps=done + 3)  # and it can go on
        assert run.progress.step == done + 3
        return done


def test_stop_ends_all_after_the_same_step(pool: Pool) -> None:
    assert pool.run(3, stop_wanted_by_one) == [7, 7, 7]


def twice_on_the_same_ddp() -> str:
    dist.init_process_group("gloo")
    model = mlp()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with pl.Run(ddp, optimizer, data(40), batch=8, probe=pl.Probe(always=True)) as run:
            train(run, ddp, steps=4)
            digest = run.replica.digest()
    return digest


def test_runs_in_sequence(pool: Pool) -> None:
    assert len(set(pool.run(2, twice_on_the_same_ddp))) == 1


def test_events(tmp_path: Path) -> None:
    memory = Memory()
    with make(record=[memory], checkpoint=pl.Checkpoint(tmp_path, every=2)) as run:
        train(run, run.model, steps=5)
        run.log(accuracy=0.5)
        run.resume(tmp_path)
    kinds = [type(event) for event in memory.events]
    assert kinds[0] is Started
    assert kinds.count(StepDone) == 5
    assert kinds.count(Saved) == 2
    assert kinds[-3:] == [Ended, Measured, Resumed]
    assert memory.closed == 1
    steps = [event for event in memory.events if isinstance(event, StepDone)]
    assert [event.step for event in steps] == [0, 1, 2, 3, 4]
    assert [event.examples for event in steps] == [8, 16, 24, 32, 40]
    for event in steps:
        assert event.applied
        assert event.learning_rate == 0.1
        assert event.counts == [8]
        assert 0 <= event.load_seconds[0] + event.compute_seconds[0] <= event.seconds
        assert event.wait_seconds == [0.0]
    ended = next(event for event in memory.events if isinstance(event, Ended))
    assert (ended.step, ended.examples, ended.reason) == (5, 40, "done")


def waiting() -> list[Any]:
    """Rank 1 is slow in its forward pass: rank 0 must be seen to wait for it."""
    memory = Memory()
    with make(record=[memory]) as run:

        def slow(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if run.fleet.rank == 1:
                threading.Event().wait(0.2)
            return F.cross_entropy(out, y)

        train(run, run.model, steps=3, loss=slow)
    return [event for event in memory.events if isinstance(event, StepDone)]


def test_the_clock_tells_waiting_from_work(pool: Pool) -> None:
    steps, nothing = pool.run(2, waiting)
    assert nothing == []  # only rank 0 records
    assert len(steps) == 3
    for event in steps:
        # The pause is 0.2 s; what a busy machine adds to either worker is not ours to bound.
        assert event.compute_seconds[1] >= 0.2
        assert min(event.wait_seconds) == 0.0
        more = event.compute_seconds[1] - event.compute_seconds[0]
        assert event.wait_seconds[0] - event.wait_seconds[1] == pytest.approx(more, abs=0.15)
    assert sum(event.wait_seconds[0] > event.wait_seconds[1] for event in steps) >= 2


SCRIPT = """
import sys, torch
import torch.nn.functional as F
sys.path.insert(0, {root!r})
from tests.problems import data, mlp
import paceline as pl
torch.set_num_threads(1)
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = pl.Run(model, optimizer, data(400), batch=8, deadline=20)
for step in run.steps(steps=1000):
    optimizer.zero_grad()
    for x, y in step:
        step.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    if step.index == 3 and run.fleet.rank == 1:
        {what}
"""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("raise KeyError('lost')", "rank 1 raised KeyError: 'lost'"),
        ("sys.exit(3)", r"rank 1 ended its process \(step"),
    ],
)
def test_a_script_that_does_not_close_the_run(tmp_path: Path, what: str, says: str) -> None:
    """No context manager: the end of the process tells the others."""
    from tests.pool import free_port

    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parent.parent), what=what))
    port = str(free_port())
    processes = []
    for rank in range(2):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        processes.append(subprocess.Popen([sys.executable, script], env=environment, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=90)[1] for process in processes]
    assert [process.returncode != 0 for process in processes] == [True, True]
    assert "WorkerLost" in errors[0]
    import re

    assert re.search(says, errors[0]), errors[0]


def test_recorders_of_a_folder_see_a_whole_run(tmp_path: Path) -> None:
    recorders = [record.JsonLines(tmp_path / "events.jsonl"), record.Trace(tmp_path / "trace.json")]
    with make(record=recorders, probe=pl.Probe(always=True), micro=2) as run:
        train(run, run.model, steps=4)
    events = list(record.read(tmp_path / "events.jsonl"))
    assert [type(event) for event in events] == [Started, *[StepDone] * 4, Ended]
    first = events[1]
    assert isinstance(first, StepDone)
    assert first.stats is not None
    assert first.stats.units == 4
    assert json.loads((tmp_path / "trace.json").read_text())


def test_freezing_and_thawing_parameters(pool: Pool) -> None:
    assert len(set(pool.run(2, thaw))) == 1


def thaw() -> str:
    model = mlp()
    assert isinstance(model, nn.Sequential)
    model[0].requires_grad_(False)
    frozen = flat(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.Run(model, optimizer, data(40), batch=8) as run:
        train(run, model, steps=2)
        assert torch.equal(frozen, flat(model[0]))
        model[0].requires_grad_(True)
        train(run, model, steps=4)
        assert not torch.equal(frozen, flat(model[0]))
        return run.replica.digest()
