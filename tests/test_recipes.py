"""Recipes for clusters: each trains, resumes, and consists of what the rules let be together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline as pl
from paceline import recipes, tasks
from paceline.testing import digest
from tests.compose.catalogue import method
from tests.compose.rules import broken, choice
from tests.pool import Pool
from tests.problems import train

pytest.importorskip("sklearn")

RECIPES: dict[str, Callable[..., recipes.Roles]] = {
    "uneven": lambda **more: recipes.uneven(48, **more),
    "slow_links": lambda **more: recipes.slow_links(48, **more),
    "slow_links, overlap": lambda **more: recipes.slow_links(48, overlap=2, **more),
    "unreliable": lambda **more: recipes.unreliable(48, **more),
    "everything": lambda **more: recipes.everything(48, 192, 4, **more),
}
every_recipe = pytest.mark.parametrize("name", RECIPES)


def made(name: str) -> pl.Run:
    task = tasks.load("digits")
    model = task.model("mlp", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return pl.Run(model, optimizer, task.train, deadline=30.0, **RECIPES[name]())


def trained(name: str, folder: Path) -> tuple[int, int, list[int], float, str]:
    """Train some epochs, go on in a new run, and see where that gets."""
    with made(name) as first:
        train(first, first.model, epochs=2)
        first.save(folder / "at.ckpt")
        stopped = first.progress.examples
    sizes: list[int] = []
    with made(name) as run:
        assert run.resume(folder / "at.ckpt")
        resumed = run.progress.examples
        train(run, run.model, each=lambda step: sizes.append(step.plan.batch), epochs=6)
        return stopped, resumed, sizes, tasks.load("digits").evaluate(run.model)["accuracy"], digest(run.model)


@pytest.mark.parametrize(("name", "workers"), list(zip(RECIPES, [3, 2, 2, 3, 3], strict=True)))
def test_it_trains_and_resumes(pool: Pool, tmp_path: Path, name: str, workers: int) -> None:
    found = pool.run(workers, trained, name, tmp_path)
    for stopped, resumed, sizes, accuracy, _ in found:
        assert resumed >= stopped >= 2 * 1437
        assert accuracy > 0.9  # 0.1 by chance; 0.961 to 0.972 were seen, once each
        assert (max(sizes) > 48) is (name == "everything")
    assert len({model for *_, model in found}) == 1


@every_recipe
def test_it_consists_of_what_goes_together(name: str) -> None:
    roles: dict[str, Any] = dict(RECIPES[name]())
    roles.pop("micro", None)
    if "sync" in roles:
        roles["codec"] = roles["sync"].codec
    names = {role: type(one).__name__ for role, one in roles.items()}
    if name.endswith("overlap"):
        names["sync"] = "LocalSGD with overlap"
    assert not broken(choice(*(method(*each) for each in names.items())))


@every_recipe
def test_it_is_made_anew_each_time(name: str) -> None:
    """Roles have a state: two runs must not share it."""
    first, second = RECIPES[name](), RECIPES[name]()
    shared = {role for role in first if first[role] is second[role]}  # type: ignore[literal-required]
    assert shared <= {"micro"}


def test_settings_are_handed_on() -> None:
    assert recipes.uneven(64, every=5)["balance"] == pl.balance.BySpeed(every=5)
    assert repr(recipes.slow_links(64, every=16, overlap=2)["sync"]) == repr(
        pl.sync.LocalSGD(16, codec=pl.codec.Uniform8(), overlap=2)
    )
    assert repr(recipes.unreliable(64, every=2, bits=4)["sync"]) == repr(pl.sync.Gossip(2, codec=pl.codec.Lattice(4)))
    found = recipes.everything(64, 512, 8, eta=0.5, every=2)
    assert found["batch"] == pl.batch.NormTest(start=64, limit=512, eta=0.5)
    assert (found["micro"], found["lr"]) == (8, pl.lr.AdaScale(base=64))
    assert repr(found["sync"]) == repr(pl.sync.LocalSGD(2, codec=pl.codec.Uniform8()))
