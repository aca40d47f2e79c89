"""What workers do with a combination: train, save in the middle, and do it again from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

import paceline as pl
from paceline.roles import Stateful, Unmet
from paceline.testing import digest
from tests.compose.catalogue import BATCH, MICRO, method
from tests.compose.rules import Choice
from tests.problems import data, mlp, train

__all__ = ["EXAMPLES", "Outcome", "make", "try_all"]

LENGTH, EPOCHS = 3 * BATCH + 4, 3  # the last step of an epoch is a short one
EXAMPLES = LENGTH * EPOCHS
MIDDLE = LENGTH + BATCH  # in the second epoch, whose order has been learnt, and within a round


class Outcome(NamedTuple):
    """What one worker has seen of a combination."""

    as_saved: bool
    """Whether the resumed run began with the state that was saved."""
    never_stopped: str
    """The model at the end."""
    resumed: str
    """The same, of the run that was resumed."""
    examples: tuple[int, int]
    """That were used in the two."""


def try_all(chosen: list[Choice], folder: Path) -> list[Outcome]:
    """One after the other in the same process; an error names the combination."""
    found = []
    for at, each in enumerate(chosen):
        try:
            found.append(_try(each, folder / str(at)))
        except Exception as error:
            error.add_note(f"in the combination {each}")
            raise
    return found


def make(chosen: Choice) -> pl.Run:
    """The run of a combination."""
    makers = {role: method(role, name).make for role, name in chosen.items()}
    encoding = {"codec": makers.pop("codec")()} if "codec" in makers else {}
    roles: dict[str, Any] = {"sync": makers.pop("sync")(**encoding)}
    roles |= {role: maker() for role, maker in makers.items()}
    if chosen["batch"] == chosen["balance"] == "EachOwn":
        roles["balance"] = roles["batch"]
    model = mlp()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if "divides gradients" in method("order", chosen["order"]).kinds:  # as only some optimizers do
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return pl.Run(model, optimizer, data(LENGTH), micro=MICRO, deadline=30.0, **roles)


def _try(chosen: Choice, folder: Path) -> Outcome:
    with make(chosen) as first:
        saved = _train_and_save(first, folder / "middle.ckpt")
    with make(chosen) as again:
        assert again.resume(folder / "middle.ckpt")
        as_saved = _state(again) == saved
        train(again, again.model, epochs=EPOCHS)
    used = first.progress.examples, again.progress.examples
    return Outcome(as_saved, digest(first.model), digest(again.model), used)


def _train_and_save(run: pl.Run, path: Path) -> str:
    states: list[str] = []

    def save() -> None:
        run.save(path)
        states.append(_state(run))

    def each(step: pl.Step) -> None:
        # In rounds of seconds workers are at the same place only where there is a round.
        together = step.round is not None or "Seconds" not in repr(run.sync)
        if not states and run.progress.examples >= MIDDLE and together:
            save()

    train(run, run.model, each=each, epochs=EPOCHS)
    if not states and isinstance(run.sync, Unmet):  # the others may have done all of the work
        save()
    return states[0]


def _state(run: pl.Run) -> str:
    """Model, optimizer, place in the data, and what the roles have learnt: the same text for the same state."""
    roles = {name: role for name, role in run.roles().items() if name != "sync"}
    learnt = {name: role.state_dict() for name, role in roles.items() if isinstance(role, Stateful)}
    return f"{digest(run.model)} {run.cursor} {learnt} {run.optimizer.state_dict()}"
