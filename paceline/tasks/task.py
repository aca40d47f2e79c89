"""What a task is: data, models, a loss and an evaluation."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from paceline.errors import SettingError
from paceline.tasks.images import Images

__all__ = ["Task", "choose", "evaluating"]

Choice = TypeVar("Choice")


@dataclass(frozen=True, eq=False)
class Task:
    """A job to train: predict the target of every example (a class, or a class for each position)."""

    name: str
    train: TensorDataset | Images
    """Examples to learn from: pairs of input and target."""
    test: TensorDataset | Images
    """Examples to judge by."""
    models: Mapping[str, Callable[[], nn.Module]] = field(repr=False)
    """Ways to make a model, by name; the first is the default."""
    padding: int | None = None
    """The target that stands for none, behind sentences of different lengths; it counts nowhere."""

    def model(self, name: str | None = None, *, seed: int = 0) -> nn.Module:
        """A new model, the default one if no name is given; the same seed gives the same weights.

        The random state of the process is left as it was.
        """
        name = next(iter(self.models)) if name is None else name
        make = choose(f"model for {self.name}", name, self.models)
        with torch.random.fork_rng(devices=[]):  # the weights are drawn on the CPU
            torch.default_generator.manual_seed(seed)
            return make()

    def loss(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """The mean cross-entropy over the examples of a batch ``(inputs, targets)``; with padding, over its targets."""
        inputs, targets = batch
        return self._cross_entropy(model(inputs), targets)

    def weight(self, batch: Sequence[Tensor]) -> int:
        """What :meth:`loss` is the mean over, for ``step.backward``: examples or, with padding, targets that count."""
        _, targets = batch
        return len(targets) if self.padding is None else int((targets != self.padding).sum())

    @torch.no_grad()
    def evaluate(self, model: nn.Module, limit: int | None = None, *, batch: int = 256) -> dict[str, float]:
        """Mean ``loss`` and ``accuracy`` over the targets of the test set, or of its first ``limit`` examples.

        ``batch`` is how many examples go through the model at once. The model's modes and the random state are
        left as they were.
        """
        if limit is not None and limit < 1:
            raise SettingError(f"limit ({limit}) must be at least 1; leave it out to use the whole test set")
        count = len(self.test) if limit is None else min(limit, len(self.test))
        # Without a generator of its own the loader draws from the global one, and changes what training draws.
        loader = DataLoader(Subset(self.test, range(count)), batch_size=batch, generator=torch.Generator())
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        loss = correct = total = 0.0
        with evaluating(model):
            for inputs, targets in loader:
                targets = targets.to(device)
                logits = model(inputs.to(device))
                there = targets != self._ignored
                counted = there.sum().item()
                loss += self._cross_entropy(logits, targets).item() * counted
                correct += ((logits.argmax(-1) == targets) & there).sum().item()
                total += counted
        return {"accuracy": correct / total, "loss": loss / total}

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        # Logits (B, C) with targets (B), or (B, T, C) with (B, T). Without padding all examples have equally many
        # targets, so the mean over targets is the mean over examples.
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=self._ignored)

    @property
    def _ignored(self) -> int:
        return -1 if self.padding is None else self.padding  # no class is -1


def choose(kind: str, name: str, options: Mapping[str, Choice]) -> Choice:
    """The option of this name; if there is none, a :class:`~paceline.errors.SettingError` with those there are."""
    if name in options:
        return options[name]
    close = difflib.get_close_matches(name, options, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise SettingError(f"unknown {kind}: {name!r}; {hint}known: {', '.join(options)}")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While inside, all of the model is in evaluation mode; then every part is back in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
