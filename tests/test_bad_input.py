"""Bad input: a clear message, and nothing lost."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import paceline as pl
from tests.pool import Pool, RemoteError
from tests.problems import data, flat, mlp, train


def make(dataset: Any = None, model: nn.Module | None = None, **settings: Any) -> pl.Run:
    model = model or mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return pl.Run(model, optimizer, dataset if dataset is not None else data(40), **{"batch": 8, **settings})


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(6)


class NoLength(Dataset[Any]):
    def __getitem__(self, at: int) -> Any:
        return torch.zeros(6)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"micro": 0}, r"micro \(0\) must be at least 1"),
        ({"batch": 0}, r"batch \(0\) must be a whole number of examples, at least 1"),
        ({"batch": True}, r"batch=True is neither a whole number nor a batch policy"),
        ({"batch": 8.0}, r"batch=8\.0 is neither a whole number nor a batch policy"),
        ({"batch": pl.batch.Fixed(8), "deadline": 0}, r"deadline \(0\) must be a positive number of seconds"),
        ({"deadline": float("inf")}, r"deadline \(inf\) must be at most 1e\+09 seconds"),
        ({"seed": 2**64}, r"seed \(18446744073709551616\) must be from -2\*\*62 to 2\*\*62 - 1"),
        ({"local_data": "no"}, r"local_data \('no'\) must be True or False"),
        ({"pin_memory": 1}, r"pin_memory \(1\) must be True or False"),
        ({"dataset": TensorDataset(torch.zeros(0, 6))}, r"the data set \(TensorDataset\) is empty"),
        ({"dataset": Stream()}, r"Stream is an iterable data set; .* map-style"),
        ({"dataset": NoLength()}, r"NoLength has no __len__"),
        ({"dataset": (torch.zeros(40, 6), torch.zeros(40))}, r"a tuple of 2 tensors .*TensorDataset"),
        ({"dataset": [torch.zeros(40, 6), torch.zeros(40, 1)]}, r"a list of 2 tensors .*TensorDataset"),
        ({"num_workers": -1}, r"num_workers \(-1\) must be 0 or more"),
        ({"prefetch": 0, "num_workers": 1}, r"prefetch \(0\) must be at least 1"),
        ({"prefetch": 4}, r"prefetch \(4\) .* needs loader processes: give num_workers, too"),
    ],
)
def test_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(pl.SettingError, match=says):
        make(**settings)


def test_frozen_model() -> None:
    model = mlp().requires_grad_(False)
    with pytest.raises(pl.SettingError, match="no parameter of the model requires a gradient"):
        make(model=model)


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ({5: 8}, "do not say how to begin"),
        ({0: 8, -1: 4}, "begins at -1"),
        ({0: 0}, r"batch \(0\) must be"),
        ([8, 16], r"\[8, 16\]\) must be a dict"),
    ],
)
def test_schedule(stages: Any, says: str) -> None:
    with pytest.raises(pl.SettingError, match=says):
        pl.batch.Schedule(stages)


@pytest.mark.parametrize("goal", [{}, {"epochs": 1, "steps": 2}, {"steps": -1}, {"epochs": 0.5}])
def test_goal(goal: dict[str, Any]) -> None:
    with make() as run, pytest.raises(pl.SettingError, match=r"run\.steps"):
        run.steps(**goal)


class Unfair:
    def __init__(self, shares: list[int]) -> None:
        self.shares = shares

    def split(self, batch: int, workers: int) -> list[int]:
        return self.shares


@pytest.mark.parametrize("shares", [[7], [4, 4], [-1]])
def test_a_balance_that_does_not_add_up(shares: list[int]) -> None:
    with pytest.raises(pl.SettingError, match="the balance split 8 examples between 1 workers into"):
        make(balance=Unfair(shares))


def one_worker_is_different(what: str) -> None:
    odd = int(os.environ["RANK"]) == 1
    if what == "dataset":
        make(data(41 if odd else 40))
    elif what == "model":
        make(model=nn.Linear(6, 4 if odd else 3))
    elif what == "setting":
        make(micro=2 if odd else 4)
    elif what == "role":
        make(order=pl.order.Sequential() if odd else pl.order.Shuffle())
    elif what == "batch":
        make(batch=1)
    elif what == "lr":
        model = mlp()
        pl.Run(model, torch.optim.SGD(model.parameters(), lr=0.2 if odd else 0.1), data(40), batch=8)
    elif what == "frozen":
        model = mlp()
        assert isinstance(model, nn.Sequential)
        model[0].requires_grad_(not odd)
        run = make(model=model)
        train(run, model, steps=1)


@pytest.mark.parametrize(
    ("what", "kind", "says"),
    [
        ("dataset", "WorkersDisagree", r"the dataset length differs between workers \(ranks 0, 2: 40; rank 1: 41\)"),
        (
            "model",
            "WorkersDisagree",
            r"the model differs between workers \(ranks 0, 2: 21 parameters .*; rank 1: 28 param",
        ),
        ("setting", "WorkersDisagree", r"the micro differs between workers \(ranks 0, 2: 4; rank 1: 2\)"),
        (
            "role",
            "WorkersDisagree",
            r"the order differs between workers \(ranks 0, 2: Shuffle\(\); rank 1: Sequential\(\)\)",
        ),
        (
            "lr",
            "WorkersDisagree",
            r"the optimizer differs between workers \(ranks 0, 2: SGD .*'lr': 0.1.*; rank 1: SGD .*0.2",
        ),
        ("frozen", "WorkersDisagree", r"the set of trained parameters differs between workers \(ranks 0, 2: 4 of"),
        ("batch", "SettingError", r"batch \(1\) is below the number of workers \(3\)"),
    ],
)
def test_workers_that_were_started_differently(pool: Pool, what: str, kind: str, says: str) -> None:
    for outcome in pool.outcomes(3, one_worker_is_different, what):
        assert isinstance(outcome, RemoteError)
        assert outcome.kind == kind
        assert re.search(says, outcome.text)


def initial_values_differ() -> tuple[torch.Tensor, list[str]]:
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pl.Run(model, optimizer, data(40), batch=8):
            pass
    return flat(model), [str(one.message) for one in caught]


def test_initial_values_are_rank_0s_with_a_warning(pool: Pool) -> None:
    (first, warned), *others = pool.run(3, initial_values_differ)
    torch.manual_seed(0)
    assert torch.equal(first, flat(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))))
    assert len(warned) == 1
    assert "ranks 1, 2 differed from rank 0's" in warned[0]
    for values, nothing in others:
        assert torch.equal(values, first)
        assert nothing == []


def test_loss_that_is_not_one_number() -> None:
    with make() as run:
        steps = run.steps(steps=1)
        step = next(steps)
        for x, y in step:
            with pytest.raises(pl.LoopError, match=r"the loss in step 0 has shape \(8,\); it must be one number"):
                step.backward(F.cross_entropy(run.model(x), y, reduction="none"))
            with pytest.raises(pl.LoopError, match=r"the loss in step 0 has type float"):
                step.backward(1.0)  # type: ignore[arg-type]
            with pytest.raises(pl.LoopError, match="does not depend on any parameter"):
                step.backward(torch.tensor(1.0))
            with pytest.raises(pl.LoopError, match="the weight -1 of a loss in step 0 must be a finite number"):
                step.backward(F.cross_entropy(run.model(x), y), weight=-1)
            step.backward(F.cross_entropy(run.model(x), y))
            with pytest.raises(pl.LoopError, match="called twice for micro-batch 1 in step 0"):
                step.backward(F.cross_entropy(run.model(x), y))
        with pytest.raises(pl.LoopError, match="outside of the loop over its micro-batches"):
            step.backward(torch.tensor(1.0))
        with pytest.raises(pl.LoopError, match="step 0 was iterated over twice"):
            list(step)


@pytest.mark.parametrize(("micro", "before"), [(None, 1), (3, 0)], ids=["what the step before left", "in pieces"])
def test_zero_grad_inside_of_the_inner_loop(micro: int | None, before: int) -> None:
    """It loses what was there; and a worker without examples, which never gets there, would send old gradients."""
    with make(micro=micro) as run:
        steps = run.steps(steps=2)
        with pytest.raises(pl.LoopError, match=rf"zero_grad\(\) was called in step {before} inside .* put it before"):
            wrongly(run, steps)


def test_zero_grad_before_the_optimizer() -> None:
    with make() as run:
        steps = run.steps(steps=1)
        step = next(steps)
        for x, y in step:
            step.backward(F.cross_entropy(run.model(x), y))
        run.optimizer.zero_grad()
        with pytest.raises(pl.LoopError, match=r"zero_grad\(\) was called between the inner loop of step 0 and"):
            run.optimizer.step()


@pytest.mark.parametrize("sync", [pl.sync.AllReduce(), pl.sync.LocalSGD(4)], ids=["AllReduce", "LocalSGD"])
def test_training_saving_and_resuming_in_a_consensus(
    sync: pl.sync.AllReduce | pl.sync.LocalSGD, tmp_path: Path
) -> None:
    """The model there is put away again at the end, so all of these would be lost or wrong."""
    with make(sync=sync) as run:
        train(run, run.model, steps=2)
        own = flat(run.model)
        with run.consensus():
            with run.consensus():  # of one that evaluates within another that does
                pass
            with pytest.raises(pl.LoopError, match=r"run.steps was called inside of run.consensus\(\).* train outside"):
                run.steps(steps=4)
            with pytest.raises(
                pl.LoopError, match=r"run.save was called inside of run.consensus\(\).* after the block"
            ):
                run.save(tmp_path / "a.ckpt")
            with pytest.raises(pl.LoopError, match=r"run.resume was called inside of run.consensus\(\).* before the"):
                run.resume(tmp_path, missing_ok=True)
        assert torch.equal(own, flat(run.model))
        assert not list(tmp_path.iterdir())
        step = next(iter(run.steps(steps=4)))
        with run.consensus(), pytest.raises(pl.LoopError, match=r"step 2 was begun inside of run.consensus\(\)"):
            list(step)


def test_the_loss_of_another_model() -> None:
    other = mlp()
    with make() as run:
        step = next(iter(run.steps(steps=1)))
        x, y = next(iter(step))
        with pytest.raises(pl.LoopError, match=r"no parameter of the run's model a gradient in step 0.* given to Run"):
            step.backward(F.cross_entropy(other(x), y))


def wrongly(run: pl.Run, steps: Iterator[pl.Step]) -> None:
    for step in steps:
        for x, y in step:
            run.optimizer.zero_grad()
            step.backward(F.cross_entropy(run.model(x), y))
        run.optimizer.step()


def test_backward_is_forgotten() -> None:
    with make(micro=3) as run:
        steps = run.steps(steps=1)
        step = next(steps)
        with pytest.raises(pl.LoopError, match=r"not called for micro-batch 1 of 3 in step 0"):
            for _ in step:
                pass


def test_a_step_is_left_early() -> None:
    before = None
    with make(micro=3) as run:
        before = flat(run.model)
        steps = run.steps(steps=2)
        step = next(steps)
        for x, y in step:
            step.backward(F.cross_entropy(run.model(x), y))
            break
        with pytest.raises(pl.LoopError, match=r"step 0 .*\(after 1 of 3 micro-batches\)"):
            run.optimizer.step()
        with pytest.raises(pl.LoopError, match=r"step 0 .*\(after 1 of 3 micro-batches\)"):
            next(steps)
        assert torch.equal(before, flat(run.model))
        with pytest.raises(pl.LoopError, match="is known when the loop over its micro-batches has ended"):
            _ = step.loss


def test_optimizer_is_not_called_or_called_twice() -> None:
    with make() as run:
        steps = run.steps(steps=3)
        for x, y in (step := next(steps)):
            step.backward(F.cross_entropy(run.model(x), y))
        with pytest.warns(UserWarning, match=r"optimizer.step\(\) was not called in step 0"):
            step = next(steps)
        for x, y in step:
            step.backward(F.cross_entropy(run.model(x), y))
        run.optimizer.step()
        with pytest.raises(pl.LoopError, match="called twice in step 1"):
            run.optimizer.step()


def test_a_numpy_number_is_a_number() -> None:
    with make(batch=np.int64(8)) as run:
        assert run.batch == pl.batch.Fixed(8)


def test_parameters_that_come_later() -> None:
    with make() as run:
        train(run, run.model, steps=1)
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        with pytest.raises(pl.LoopError, match="was given parameters after the run was made"):
            train(run, run.model, steps=2)


def test_loops_within_loops_and_after_the_end() -> None:
    with make() as run:
        outer = run.steps(steps=3)
        next(outer)
        with pytest.raises(pl.LoopError, match=r"another loop over run\.steps\(\) has not ended"):
            run.steps(steps=3)
        outer.close()  # type: ignore[attr-defined]
        train(run, run.model, steps=1)
    with pytest.raises(pl.LoopError, match="the run was closed"):
        run.steps(steps=3)
    with pytest.raises(pl.FleetError, match="this run was closed"):
        run.save("anywhere")


def test_an_optimizer_with_a_closure() -> None:
    model = mlp()
    with pytest.raises(pl.SettingError, match="LBFGS needs a closure"):
        pl.Run(model, torch.optim.LBFGS(model.parameters()), data(40), batch=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.Run(model, optimizer, data(40), batch=8) as run:
        steps = run.steps(steps=1)
        for x, y in (step := next(steps)):
            step.backward(F.cross_entropy(model(x), y))
        with pytest.raises(pl.LoopError, match=r"optimizer\.step\(closure\) in step 0"):
            optimizer.step(lambda: 0.0)


def test_pinned_memory_for_a_model_on_the_cpu() -> None:
    with pytest.warns(UserWarning, match="pin_memory has no effect"), make(pin_memory=True):
        pass


def test_measurements_that_nobody_asks_for() -> None:
    with pytest.raises(
        pl.SettingError, match=r"probe=Probe\(exact=True.* has no effect.* leave it out, or write Probe"
    ):
        make(probe=pl.Probe(exact=True))
    late = pl.sync.LocalSGD(4, measuring=pl.sync.Measuring.LAST)
    with pytest.raises(pl.SettingError, match=r"LocalSGD\(measuring=.*LAST\) has no effect.* use batch.NormTest"):
        make(sync=late)
    for probe, rule in [(pl.Probe(exact=True), pl.lr.AdaScale(8)), (pl.Probe(always=True), pl.lr.Constant())]:
        make(sync=pl.sync.LocalSGD(4, measuring=pl.sync.Measuring.LAST), probe=probe, lr=rule, micro=4).close()


def test_measurements_where_workers_never_meet() -> None:
    with pytest.raises(
        pl.SettingError, match=r"Probe\(always=True\) compares .* under Gossip they never come together"
    ):
        make(sync=pl.sync.Gossip(4), probe=pl.Probe(always=True))


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, at: int) -> Any:
        if at == 13:
            raise OSError("cannot read image 13")
        return torch.zeros(6), 0


def with_broken_data(num_workers: int) -> None:
    with make(Broken(), order=pl.order.Sequential(), num_workers=num_workers) as run:
        train(run, run.model, epochs=1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_raises(pool: Pool, num_workers: int) -> None:
    """Example 13 is in step 1, in the second worker's half."""
    first, second = pool.outcomes(2, with_broken_data, num_workers)
    assert isinstance(second, RemoteError)
    assert second.kind == "OSError"
    assert "cannot read image 13" in second.text
    assert isinstance(first, RemoteError)
    assert first.kind == "WorkerLost"
    assert re.search(r"rank 1 raised OSError: .*cannot read image 13", first.text, re.DOTALL)


def test_a_disk_that_cannot_be_written_to(tmp_path: Path) -> None:
    """The error is clear, the earlier checkpoint stays, and the training can go on."""
    (tmp_path / "file").write_text("not a folder")
    with make() as run:
        train(run, run.model, steps=2)
        good = run.save(tmp_path / "good.ckpt")
        with pytest.raises(pl.CheckpointError, match="cannot save the checkpoint"):
            run.save(tmp_path / "file" / "below.ckpt")
        train(run, run.model, steps=4)
        assert run.progress.step == 4
        assert run.resume(good)
        assert run.progress.step == 2


def test_save_in_the_middle_of_a_step(tmp_path: Path) -> None:
    with make(micro=2) as run:
        steps = run.steps(steps=1)
        step = next(steps)
        for x, y in step:
            step.backward(F.cross_entropy(run.model(x), y))
            with pytest.raises(pl.LoopError, match=r"after 1 of 4 micro-batches"):
                run.save(tmp_path / "early.ckpt")
            break
    assert not list(tmp_path.iterdir())


def test_save_before_the_optimizer_has_stepped(tmp_path: Path) -> None:
    with make() as run:
        steps = run.steps(steps=1)
        for x, y in (step := next(steps)):
            step.backward(F.cross_entropy(run.model(x), y))
        with pytest.raises(pl.LoopError, match=r"run\.save was called before optimizer\.step\(\) in step 0"):
            run.save(tmp_path / "early.ckpt")
        run.optimizer.step()
        assert run.save(tmp_path / "right.ckpt").exists()


def test_resume_from_nothing(tmp_path: Path) -> None:
    with make() as run:
        with pytest.raises(pl.CheckpointError, match="no such file or folder"):
            run.resume(tmp_path / "nowhere")
        assert run.resume(tmp_path / "nowhere", missing_ok=True) is False


def test_resume_what_does_not_fit(tmp_path: Path) -> None:
    with make() as run:
        train(run, run.model, steps=3)
        saved = run.save(tmp_path / "a.ckpt")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": nn.Linear(6, 3)}, "the model of the checkpoint is"),
        ({"dataset": data(41)}, "the dataset length of the checkpoint is 40, but the run's is 41"),
        ({"seed": 5}, "the seed of the checkpoint is 0, but the run's is 5"),
        (
            {"order": pl.order.Sequential()},
            r"the order of the checkpoint is Shuffle\(\), but the run's is Sequential\(\)",
        ),
        ({"scaler": torch.amp.GradScaler("cpu")}, "GradScaler"),
        ({"stateful": {"more": torch.optim.swa_utils.AveragedModel(mlp())}}, "the objects in `stateful`"),
    ]
    for settings, says in cases:
        with make(**settings) as run:
            before = flat(run.model)
            with pytest.raises(pl.CheckpointError, match=says):
                run.resume(saved)
            assert torch.equal(before, flat(run.model))


def test_resume_with_another_optimizer(tmp_path: Path) -> None:
    with make() as run:
        train(run, run.model, steps=3)
        saved = run.save(tmp_path / "a.ckpt")
    model = mlp()
    with pl.Run(model, torch.optim.Adam(model.parameters()), data(40), batch=8) as run:
        before = flat(model)
        with pytest.raises(pl.CheckpointError, match="the optimizer of the checkpoint is SGD"):
            run.resume(saved)
        assert torch.equal(before, flat(model))
        assert run.progress.step == 0


def test_half_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(pl.SettingError, match="WORLD_SIZE is 2 but RANK, MASTER_ADDR, MASTER_PORT is not set"):
        make()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lr": 0.1}, r"lr=0.1 has no method factor; .*the learning rate .*its scheduler to stateful="),
        (
            {"balance": [2, 1]},
            r"balance=\[2, 1\] has no method split; .* pl.balance.BySpeed\(\) or pl.balance.Fixed\(\[2, 1\]\)",
        ),
        ({"balance": pl.balance.BySpeed}, r"balance=BySpeed is a class; write BySpeed\(…\)"),
        ({"order": "random"}, "order='random' has no method permutation"),
        ({"sync": pl.sync.LocalSGD}, "sync=LocalSGD is a class"),
    ],
)
def test_what_is_no_role(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(pl.SettingError, match=says):
        make(**settings)


def test_what_is_no_model_no_optimizer_or_another_models() -> None:
    model, others = mlp(), mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(pl.SettingError, match=r"model is a SGD, not a torch.nn.Module; write Run\(model, optimizer"):
        pl.Run(optimizer, model, data(40), batch=8)  # type: ignore[arg-type]
    with pytest.raises(pl.SettingError, match=r"the class SGD; write Run\(model, SGD\(model.parameters\(\), …\), …\)"):
        pl.Run(model, torch.optim.SGD, data(40), batch=8)  # type: ignore[arg-type]
    with pytest.raises(pl.SettingError, match="optimizer is a float"):
        pl.Run(model, 0.1, data(40), batch=8)  # type: ignore[arg-type]
    with pytest.raises(pl.SettingError, match="the optimizer has no parameter of the model"):
        pl.Run(others, optimizer, data(40), batch=8)


def test_a_folder_instead_of_a_checkpoint() -> None:
    with pytest.raises(pl.SettingError, match=r"checkpoint='saves' must be .* Checkpoint\('saves', every=100\)"):
        make(checkpoint="saves")


def test_a_frozen_model_with_a_head_of_its_own_trains() -> None:
    model = mlp()
    model.requires_grad_(False)
    prompt = nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.SGD([prompt], lr=0.1)
    with pl.Run(model, optimizer, data(40), batch=8) as run:
        for step in run.steps(steps=2):
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x + prompt), y))
            optimizer.step()
    assert prompt.abs().sum() > 0


def test_words_instead_of_numbers_to_log() -> None:
    with make() as run, pytest.raises(pl.SettingError, match=r"run\.log takes numbers, but accuracy is 'high'"):
        run.log(accuracy="high")  # type: ignore[arg-type]
    with make() as run, pytest.raises(pl.SettingError, match=r"run\.log takes numbers, but both is tensor"):
        run.log(both=torch.ones(2))  # type: ignore[arg-type]


def test_an_optimizer_that_steps_in_the_inner_loop() -> None:
    with make() as run:
        steps = run.steps(steps=1)
        for x, y in (step := next(steps)):
            step.backward(F.cross_entropy(run.model(x), y))
            with pytest.raises(pl.LoopError, match=r"optimizer\.step\(\) was called before the inner loop of step 0"):
                run.optimizer.step()
            break


def test_an_outer_optimizer_that_is_made_already() -> None:
    made: Any = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(pl.SettingError, match=r"outer \(SGD\) must be a function from parameters"):
        pl.sync.LocalSGD(4, outer=made)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"micro": "16"}, r"micro \('16'\) must be at least 1 example"),
        ({"micro": 16.0}, r"micro \(16.0\) must be at least 1 example"),
        ({"seed": "0"}, r"seed \('0'\) must be a whole number"),
        ({"deadline": "300"}, r"deadline \('300'\) must be a number of seconds"),
        ({"scaler": True}, "scaler=True must be a GradScaler"),
        ({"stateful": [1]}, r"must be objects by name, such as stateful=\{'scheduler': scheduler\}"),
        ({"stateful": {"a": object()}}, "stateful: 'a' .* has no method state_dict"),
        ({"record": True}, "record=True must be a folder, or a list of recorders"),
        ({"record": [pl.record.Console]}, "must be a folder, or a list of recorders"),
        ({"balance": "even"}, "balance='even' has no method split"),
        ({"lr": pl.sync.LocalSGD(8)}, r"is a sync; write sync=LocalSGD"),
    ],
)
def test_settings_of_other_kinds(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(pl.SettingError, match=says):
        make(**setting)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: pl.batch.NormTest(start=8, limit=64, eta="0.5"),  # type: ignore[arg-type]
        lambda: pl.batch.NormTest(start=8, limit=64, eta=0.5, growth="2"),  # type: ignore[arg-type]
        lambda: pl.batch.CoordinateTest(start=8, limit=64, eta=0.5, quantile="1"),  # type: ignore[arg-type]
        lambda: pl.batch.InnerProductTest(start=8, limit=64, theta="1"),  # type: ignore[arg-type]
        lambda: pl.lr.AdaScale(8, power="1"),  # type: ignore[arg-type]
    ],
)
def test_numbers_that_are_text(wrong: Callable[[], object]) -> None:
    with pytest.raises(pl.SettingError, match=r"'(0\.5|1|2)'\) must be a number"):
        wrong()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: pl.order.PairBalance(preconditioned="no"), r"PairBalance: preconditioned \('no'\)"),  # type: ignore[arg-type]
        (lambda: pl.order.GraB(exact=1), r"GraB: exact \(1\)"),  # type: ignore[arg-type]
        (lambda: pl.balance.BySpeed(leave_out="no"), r"BySpeed: leave_out \('no'\)"),  # type: ignore[arg-type]
        (lambda: pl.Probe(always="no"), r"Probe: always \('no'\)"),  # type: ignore[arg-type]
    ],
)
def test_flags_that_are_neither_yes_nor_no(wrong: Callable[[], object], says: str) -> None:
    with pytest.raises(pl.SettingError, match=says + " must be True or False"):
        wrong()


def steps_or_not(skips: tuple[int, ...], at: int) -> None:
    warnings.filterwarnings("ignore", message=r"optimizer.step\(\) was not called")
    with make() as run:
        for step in run.steps(steps=4):
            run.optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(run.model(x), y))
            if step.index != at or run.fleet.rank not in skips:
                run.optimizer.step()


@pytest.mark.parametrize("at", [1, 3], ids=["within", "at the end"])
def test_an_optimizer_that_steps_on_some_workers_only(pool: Pool, at: int) -> None:
    pool.run(3, steps_or_not, (0, 1, 2), at)
    for outcome in pool.outcomes(3, steps_or_not, (1,), at):
        assert isinstance(outcome, RemoteError)
        assert outcome.kind == "WorkersDisagree"
        assert f"was called in step {at} on some workers, but not on ranks [1]" in outcome.text


def test_a_goal_that_was_reached_before() -> None:
    """Totals are no epochs more."""
    with make() as run:
        train(run, run.model, epochs=1)
        with pytest.warns(UserWarning, match=r"run.steps\(epochs=1\) has nothing to do: .* write epochs=epoch \+ 1"):
            train(run, run.model, epochs=1)
        train(run, run.model, epochs=2)
        assert run.progress.epoch == 2


def test_a_loader_is_no_data_set() -> None:
    with pytest.raises(pl.SettingError, match=r"give loader\.dataset, and batch="):
        make(dataset=torch.utils.data.DataLoader(data(40)))
