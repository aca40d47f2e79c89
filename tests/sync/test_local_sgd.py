"""What LocalSGD refuses, and what it does in corners: one process, elastic resume, scalers, token weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline as pl
from paceline import sync
from paceline.records import Progress
from tests.pool import Pool, RemoteError
from tests.problems import data, flat, mlp, train


def make(role: sync.LocalSGD, **settings: Any) -> pl.Run:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return pl.Run(model, optimizer, data(40), batch=8, sync=role, **settings)


@pytest.mark.parametrize(
    ("every", "says"),
    [
        (0, r"every \(0\) must be whole numbers of at least 1; 1 averages after every step"),
        (-3, r"every \(-3\) must be whole numbers of at least 1"),
        (sync.Examples(0), r"every \(Examples\(count=0\)\) must be whole numbers of at least 1"),
        (sync.Steps(2.5), r"every \(Steps\(count=2.5\)\) must be whole numbers of at least 1"),  # type: ignore[arg-type]
        (sync.PostLocal(-1, 4), r"after \(-1\) must be a whole number of steps, at least 0"),
        (sync.PostLocal(1, 0), r"every \(0\) must be whole numbers of at least 1"),
        (sync.Ramp(1, 8, 0.5, 10), r"never gets from first to last; a factor above 1 grows"),
        (sync.Ramp(8, 1, 2.0, 10), r"never gets from first to last"),
        (sync.Ramp(1, 8, 2.0, 0), r"must be whole numbers of at least 1"),
        (sync.Ramp(8, 1, float("nan"), 10), r"never gets from first to last"),
        (sync.PostLocal(1.5, 4), r"whole number of steps"),  # type: ignore[arg-type]
        (True, r"every \(True\) must be whole numbers of at least 1"),
        (sync.Examples("a"), r"must be whole numbers of at least 1"),  # type: ignore[arg-type]
        (sync.Seconds, r"every \(Seconds\) is a class; write Seconds\(…\)"),
    ],
)
def test_periods_that_cannot_be(every: Any, says: str) -> None:
    with pytest.raises(pl.SettingError, match=says):
        sync.LocalSGD(every)


def test_a_role_serves_one_run() -> None:
    role = sync.LocalSGD(2)
    with make(role), pytest.raises(pl.SettingError, match="serves another run that is not closed"):
        make(role)
    with make(role):
        pass


def wrapped() -> None:
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(mlp())
    with pl.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), data(40), batch=8, sync=sync.LocalSGD(2)):
        pass


def test_a_module_wrapped_in_ddp_is_refused(pool: Pool) -> None:
    for outcome in pool.outcomes(2, wrapped):
        assert isinstance(outcome, RemoteError)
        assert "which LocalSGD is there to avoid; give Run the bare module" in outcome.text


def test_one_process_is_plain_training() -> None:
    with make(sync.LocalSGD(3)) as local, make(sync.LocalSGD(1)) as every_step:
        for run in (local, every_step):
            train(run, run.model, epochs=2)
        torch.testing.assert_close(flat(local.model), flat(every_step.model), rtol=0, atol=0)


def with_weights(kind: str) -> Tensor:
    """A loss that averages over tokens: example i has i % 5 of them."""
    model = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    role: Any = sync.LocalSGD(1) if kind == "local" else sync.AllReduce()
    x, y = data(40).tensors
    tokens = torch.arange(40) % 5 + 1.0
    dataset = torch.utils.data.TensorDataset(x.double(), y, tokens.double())
    with pl.Run(model, optimizer, dataset, batch=9, sync=role, micro=2) as run:
        for step in run.steps(epochs=2):
            optimizer.zero_grad()
            for inputs, labels, weights in step:
                each = F.cross_entropy(model(inputs), labels, reduction="none")
                step.backward((each * weights).sum() / weights.sum(), weight=float(weights.sum()))
            optimizer.step()
    return flat(model)


def test_token_weights_are_those_of_all_reduce(pool: Pool) -> None:
    local, all_reduce = pool.run(2, with_weights, "local"), pool.run(2, with_weights, "all-reduce")
    torch.testing.assert_close(local[0], all_reduce[0], rtol=0, atol=1e-12)


def saved_in_a_round(folder: Path, resume: bool, steps: int) -> tuple[int, list[int], str]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[int] = []
    with pl.Run(model, optimizer, data(60), batch=12, sync=sync.LocalSGD(4, outer=sync.DiLoCo())) as run:
        if resume:
            assert run.resume(folder / "saved.ckpt")

        def each(step: pl.Step) -> None:
            seen.append(step.plan.counts[run.fleet.rank])
            if step.index == 5 and not resume:
                run.save(folder / "saved.ckpt")

        train(run, model, each=each, steps=steps)
        return run.progress.examples, seen, run.replica.digest()


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_another_number_of_workers_goes_on_from_the_average(pool: Pool, tmp_path: Path, workers: int) -> None:
    pool.run(3, saved_in_a_round, tmp_path, False, 7)
    found = pool.run(workers, saved_in_a_round, tmp_path, True, 12)
    assert {examples for examples, _, _ in found} == {144}
    assert sum(sum(counts) for _, counts, _ in found) == 6 * 12  # the six steps that were left
    assert len({digest for _, _, digest in found}) == 1


def with_a_scaler(workers_that_overflow: list[int], at: int) -> tuple[list[str], int]:
    """One worker's gradients overflow in one step, so that its scaler skips it there, and only there."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    digests = []
    with pl.Run(model, optimizer, data(48), batch=8, sync=sync.LocalSGD(3), scaler=scaler) as run:
        for step in run.steps(steps=6):
            optimizer.zero_grad()
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                if step.index == at and run.fleet.rank in workers_that_overflow:
                    loss = loss * float("inf")
                step.backward(loss)
            scaler.step(optimizer)
            scaler.update()
            with run.consensus():
                digests.append(run.replica.digest())
        return [*digests, run.replica.digest()], run.progress.step


@pytest.mark.parametrize("at", [1, 2])  # in the middle of the round, and at its end
@pytest.mark.parametrize("who", [[0], [1], [0, 1]])
def test_a_step_that_one_scaler_skips_does_not_upset_the_round(pool: Pool, who: list[int], at: int) -> None:
    first, second = pool.run(2, with_a_scaler, who, at)
    assert first == second
    assert first[1] == 6


def bytes_of(every: int) -> list[int]:
    sent: list[int] = []
    model = nn.Linear(10_000, 10)
    with pl.Run(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data(48, 10_000, 10), batch=8, sync=sync.LocalSGD(every)
    ) as run:
        train(run, model, each=lambda step: sent.append(run.sync.bytes_sent), steps=6)
    return sent


def test_bytes_are_one_model_for_a_round(pool: Pool) -> None:
    (sent, _) = pool.run(2, bytes_of, 3)
    model = 4 * (10_000 * 10 + 10)
    assert [count > 0 for count in sent] == [False, False, True] * 2
    assert all(model < count < 1.01 * model for count in (sent[2], sent[5]))


def test_a_ramp_goes_on_for_ever() -> None:
    ramp = sync.Ramp(1, 32, 2.0, 10)
    for begin in (0, 10_240, 10**9):
        lengths = [count for count in range(1, 65) if ramp.ends(Progress(begin), Progress(begin + count))]
        assert lengths[0] == (1 if begin == 0 else 32)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"measuring": "last"}, r"measuring \('last'\) must be Measuring"),
        ({"overlap": True}, r"overlap \(True\) must be a whole number of steps"),
        ({"optimizer_state": sync.Average}, r"optimizer_state=Average is a class; write Average\(…\)"),
        ({"optimizer_state": "average"}, r"optimizer_state='average' .*Keep\(\), Average\(\) or Reset\(\)"),
        ({"codec": pl.codec.Uniform8}, r"codec=Uniform8 is a class; write Uniform8\(…\)"),
        ({"codec": "uniform8"}, r"codec='uniform8' has no method decode; .*codec.Uniform8\(\)"),
        ({"outer": sync.DiLoCo}, r"outer \(DiLoCo\) must be a function .*, such as DiLoCo\(\)"),
        ({"outer": torch.optim.SGD}, r"outer \(SGD\) must be a function"),
    ],
)
def test_settings_of_a_wrong_kind(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(pl.SettingError, match=says):
        sync.LocalSGD(4, **settings)


def test_a_codec_by_its_name_under_all_reduce() -> None:
    with pytest.raises(pl.SettingError, match="codec='half' has no method decode"):
        sync.AllReduce(codec="half")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [sync.DiLoCo, sync.SlowMo])
def test_rates_of_an_outer_optimizer(kind: Any) -> None:
    for settings in ({"lr": -1.0}, {"lr": "a"}, {"momentum": 1.0}, {"momentum": float("nan")}):
        with pytest.raises(pl.SettingError, match=rf"of {kind.__name__} must be a number of at least 0"):
            kind(**settings)


def test_an_outer_optimizer_without_momentum_and_with_a_number_of_numpy() -> None:
    made = sync.DiLoCo(lr=np.float32(0.5), momentum=0.0)(list(mlp().parameters()))  # type: ignore[arg-type]
    assert made.param_groups[0]["nesterov"] is False


def decaying(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def test_another_outer_optimizer_keeps_its_own_settings(tmp_path: Path) -> None:
    """A schedule of the user's may have changed them."""
    role = sync.LocalSGD(4, outer=decaying)
    with make(role) as run:
        train(run, run.model, steps=8)
        outer_of(role)["lr"] = 0.25
        saved = run.save(tmp_path / "a.ckpt")
    again = sync.LocalSGD(4, outer=decaying)
    with make(again) as run:
        run.resume(saved)
        assert outer_of(again)["lr"] == 0.25


class Odd:
    """A user's own period, with a name that ours have, too."""

    first = True

    def ends(self, begin: Progress, now: Progress) -> bool:
        return now.step % 2 == 1


def test_a_period_of_the_users_own() -> None:
    ends: list[int] = []
    with make(sync.LocalSGD(Odd())) as run:
        train(run, run.model, steps=4, each=lambda step: ends.append(step.index) if step.round is not None else None)
    assert ends == [0, 2, 3]  # and the loop's end


def test_what_makes_no_outer_optimizer() -> None:
    with pytest.raises(pl.SettingError, match="outer gave 3 for a list of parameters"):
        make(sync.LocalSGD(4, outer=lambda parameters: 3))  # type: ignore[arg-type, return-value]


def test_rounds_inside_that_are_longer_than_those_between() -> None:
    with pytest.raises(pl.SettingError, match=r"inside \(4\) is longer than between \(3\)"):
        sync.Hierarchical(4, 3)
    with pytest.raises(pl.SettingError, match=r"inside \(0\) must be"):
        sync.Hierarchical(0, 3)


def outer_of(role: sync.LocalSGD) -> dict[str, Any]:
    assert role.outer is not None
    assert role.outer._optimizer is not None
    return role.outer._optimizer.param_groups[0]


def test_resume_with_an_outer_optimizer(tmp_path: Path) -> None:
    """Its settings are those that are given now; the momentum of another kind is not taken over."""
    with make(sync.LocalSGD(4, outer=sync.DiLoCo())) as run:
        train(run, run.model, steps=8)
        saved = run.save(tmp_path / "a.ckpt")
    for other in (None, sync.SlowMo(), lambda parameters: torch.optim.Adam(parameters, lr=1e-3)):
        with make(sync.LocalSGD(4, outer=other)) as run:
            before = flat(run.model)
            with pytest.raises(pl.CheckpointError, match="made with sync=LocalSGD with outer DiLoCo, whose state"):
                run.resume(saved)
            assert torch.equal(before, flat(run.model))
    role = sync.LocalSGD(4, outer=sync.DiLoCo(lr=0.1, momentum=0.2))
    with make(role) as run:
        run.resume(saved)
        assert (outer_of(role)["lr"], outer_of(role)["momentum"]) == (0.1, 0.2)
        assert role.outer is not None
        assert role.outer._optimizer is not None
        assert len(role.outer._optimizer.state) > 0  # but for that, it goes on


def from_gradients_to_models(path: str) -> list[Tensor]:
    """A run of AllReduce goes on as Local SGD, whose rounds begin there."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pl.Run(model, optimizer, data(160), batch=16) as run:
        train(run, model, steps=5)
        run.save(path)
        train(run, model, steps=7)
    expected = flat(model)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pl.Run(model, optimizer, data(160), batch=16, sync=sync.LocalSGD(1)) as run:
        run.resume(path)
        assert run.progress.step == 5
        train(run, model, steps=7)
    return [expected, flat(model)]


def test_an_all_reduce_run_goes_on_as_local_sgd(pool: Pool, tmp_path: Path) -> None:
    """With momentum, averages after every step are those of gradients: so nothing was lost on the way."""
    for expected, found in pool.run(2, from_gradients_to_models, str(tmp_path / "a.ckpt")):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_run_that_cannot_be_made_leaves_the_role_free() -> None:
    role = sync.LocalSGD(2)
    with pytest.raises(pl.SettingError, match="num_workers"):
        make(role, num_workers=-1)
    with make(role):
        pass
