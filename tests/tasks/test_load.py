from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline import tasks
from paceline.errors import SettingError
from paceline.tasks import MLP, CharTransformer, Task


def random_task(count: int = 23) -> Task:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 5, generator=generator)
    targets = torch.randint(0, 4, (count,), generator=generator)
    data = TensorDataset(inputs, targets)
    models = {
        "mlp": lambda: MLP([5, 8, 4]),
        "dropout": lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 4)),
    }
    return Task(name="random", train=data, test=data, models=models)


def random_text_task() -> Task:
    ids = torch.randint(0, 7, (11, 6), generator=torch.Generator().manual_seed(4))
    data = TensorDataset(ids, ids.roll(-1, 1))
    return Task(name="text", train=data, test=data, models={"transformer": lambda: CharTransformer(7, 6, width=16)})


def random_padded_task() -> Task:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, 7, (11, 6), generator=generator)
    ids *= torch.arange(6) < torch.randint(1, 7, (11, 1), generator=generator)  # sentences of 1 to 6
    data = TensorDataset(ids, ids)
    models = {"transformer": lambda: CharTransformer(7, 6, width=16)}
    return Task(name="padded", train=data, test=data, models=models, padding=0)


def whole(data: object) -> tuple[Tensor, Tensor]:
    assert isinstance(data, TensorDataset)
    inputs, targets = data.tensors
    return inputs, targets


def test_names_begin_with_the_one_that_needs_no_file() -> None:
    assert tasks.names() == ["digits", "fashion-mnist", "cifar10", "sst2", "tinyshakespeare", "multi30k"]


def test_everything_public_is_listed_and_documented() -> None:
    for name in tasks.__all__:
        assert getattr(tasks, name).__doc__, name


def test_an_unknown_task_names_the_close_one_and_all() -> None:
    with pytest.raises(SettingError, match=r"unknown task: 'fashion_mnist'; did you mean 'fashion-mnist'\?") as error:
        tasks.load("fashion_mnist")
    for name in tasks.names():
        assert name in str(error.value)


def test_an_unknown_task_without_a_close_one() -> None:
    with pytest.raises(SettingError, match=r"unknown task: 'zzz'; known: digits, fashion-mnist"):
        tasks.load("zzz")


def test_an_unknown_model_names_the_close_one() -> None:
    with pytest.raises(
        SettingError, match=r"unknown model for random: 'mpl'; did you mean 'mlp'\? known: mlp, dropout"
    ):
        random_task().model("mpl")


def test_import_is_light() -> None:
    code = "import sys, paceline.tasks; print([name for name in ('sklearn', 'PIL') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_first_model_is_the_default() -> None:
    assert isinstance(random_task().model(), MLP)
    assert isinstance(random_task().model("dropout"), nn.Sequential)


def test_a_model_depends_on_its_seed_alone() -> None:
    task = random_task()
    torch.manual_seed(1)
    first = task.model(seed=5)
    torch.manual_seed(2)
    same = task.model("mlp", seed=5)
    other = task.model(seed=6)
    for a, b, c in zip(first.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_a_model_is_what_manual_seed_gives() -> None:
    task = random_task()
    torch.manual_seed(9)
    expected = MLP([5, 8, 4])
    for a, b in zip(task.model(seed=9).parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b)


def test_making_a_model_leaves_the_random_state() -> None:
    before = torch.random.get_rng_state()
    random_task().model(seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("task", [random_task(), random_text_task()], ids=lambda task: task.name)
def test_the_loss_of_a_batch_is_the_mean_over_its_examples(task: Task) -> None:
    model = task.model()
    inputs, targets = whole(task.train)
    singles = [task.loss(model, (inputs[i : i + 1], targets[i : i + 1])) for i in range(len(inputs))]
    # float32 sums of about twenty numbers near 1.4, in another order
    torch.testing.assert_close(task.loss(model, (inputs, targets)), torch.stack(singles).mean(), rtol=1e-5, atol=0)


def test_the_weight_of_a_batch_is_its_examples() -> None:
    for task in (random_task(), random_text_task()):
        assert task.weight(whole(task.train)) == len(task.train)


def test_with_padding_the_weighted_losses_of_pieces_are_that_of_the_whole() -> None:
    task = random_padded_task()
    model = task.model()
    inputs, targets = whole(task.train)
    pieces = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]
    weights = [task.weight(piece) for piece in pieces]
    assert sum(weights) == task.weight((inputs, targets)) == (targets > 0).sum() < targets.numel()
    total = sum(weight * task.loss(model, piece) for weight, piece in zip(weights, pieces, strict=True))
    # float32 sums of about forty numbers near 2, in another order
    torch.testing.assert_close(total / sum(weights), task.loss(model, (inputs, targets)), rtol=1e-5, atol=0)


def test_the_loss_can_be_trained() -> None:
    task = random_task()
    model = task.model()
    task.loss(model, whole(task.train)).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("limit", [None, 1, 9, 1000])
@pytest.mark.parametrize("batch", [4, 256])
def test_evaluate_equals_one_big_forward_pass(limit: int | None, batch: int) -> None:
    task = random_task()
    model = task.model()
    inputs, targets = (tensor[:limit] for tensor in whole(task.test))
    with torch.no_grad():
        logits = model(inputs)
    result = task.evaluate(model, limit, batch=batch)
    assert result["accuracy"] == pytest.approx((logits.argmax(1) == targets).double().mean().item(), abs=1e-12)
    assert result["loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-5)  # float32 rounding


def test_evaluate_counts_every_position_of_a_text() -> None:
    task = random_text_task()
    model = task.model()
    inputs, targets = whole(task.test)
    with torch.no_grad():
        logits = model(inputs)
    result = task.evaluate(model, batch=4)
    assert result["accuracy"] == pytest.approx((logits.argmax(2) == targets).double().mean().item(), abs=1e-12)
    assert result["loss"] == pytest.approx(F.cross_entropy(logits.mT, targets).item(), rel=1e-5)  # float32 rounding


def test_evaluate_does_not_count_padding() -> None:
    task = random_padded_task()
    model = task.model()
    inputs, targets = whole(task.test)
    with torch.no_grad():
        logits = model(inputs)[targets > 0]
    there = targets[targets > 0]
    result = task.evaluate(model, batch=4)
    assert result["accuracy"] == pytest.approx((logits.argmax(1) == there).double().mean().item(), abs=1e-12)
    assert result["loss"] == pytest.approx(F.cross_entropy(logits, there).item(), rel=1e-5)  # float32 rounding


def test_evaluate_is_without_dropout_and_gives_every_mode_back() -> None:
    task = random_task()
    model = task.model("dropout")
    assert isinstance(model, nn.Sequential)
    model[2].eval()  # a part that the user has frozen must stay so
    assert task.evaluate(model) == task.evaluate(model)
    assert [module.training for module in model.modules()] == [True, True, True, False]


def test_evaluate_gives_the_modes_back_when_the_model_fails() -> None:
    model = nn.Linear(99, 4)
    with pytest.raises(RuntimeError):
        random_task().evaluate(model)
    assert model.training


def test_evaluate_leaves_random_state_and_gradients() -> None:
    task = random_task()
    model = task.model("dropout")
    before = torch.random.get_rng_state()
    task.evaluate(model)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_evaluate_keeps_no_graph() -> None:
    task = random_task()
    seen = []
    model = task.model()
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.requires_grad))
    task.evaluate(model)
    assert seen == [False]


@pytest.mark.parametrize("limit", [0, -3])
def test_evaluate_refuses_to_judge_by_nothing(limit: int) -> None:
    task = random_task()
    with pytest.raises(SettingError, match=rf"limit \({limit}\) must be at least 1"):
        task.evaluate(task.model(), limit)
