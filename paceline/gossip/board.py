"""Where a trainer and the thread beside it meet: the model that others may see, and what came of exchanges."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["Board"]


class Board:
    """Shows a copy of the model, and collects corrections until the trainer takes them.

    Corrections that the trainer has not taken yet are in the copy already: otherwise a second partner would be averaged
    with a model that the first has moved, and the way be gone twice. Copies change places, so that one that is being
    sent is never written to. The model has ``numel`` numbers that are averaged in exchanges, then ``more`` that are
    not: buffers, which only who takes the whole model gets.
    """

    def __init__(self, numel: int, more: int = 0) -> None:
        self._lock = threading.Lock()
        self._shown: Tensor | None = None
        self._lent: Tensor | None = None
        self._filled: Tensor | None = None
        self._spare = [torch.empty(numel + more) for _ in range(3)]
        self._numel = numel
        self._pending = torch.zeros(numel)
        self._taken = torch.zeros(numel)
        self._waiting = 0
        self._version = self._lent_version = 0
        self._made_of: list[int] = []
        self.age = 0
        """How many copies were shown between those that corrections were made of and those that they met, in all."""
        self.taken = 0
        """How many corrections that is."""

    def blank(self) -> Tensor:
        """For the trainer: where to write the next copy to."""
        with self._lock:
            self._filled = None
            self._filled = self._free()
            return self._filled

    def show(self, model: Tensor) -> None:
        """For the trainer: this copy, a :meth:`blank` that was filled, is shown from now on."""
        with self._lock:
            if self._waiting:
                model[: self._numel] += self._pending
            self._shown, self._filled = model, None
            self._version += 1

    def take(self) -> Tensor | None:
        """For the trainer: what is to be added to the model now; None if nothing has come. Valid until the next."""
        with self._lock:
            if not self._waiting:
                return None
            self._pending, self._taken = self._taken, self._pending
            self._pending.zero_()
            self._waiting = 0
            self.age += sum(self._version - version for version in self._made_of)
            self.taken += len(self._made_of)
            self._made_of.clear()
            return self._taken

    def lend(self) -> Tensor | None:
        """For the thread: the model that is shown, to be left alone until :meth:`give_back`; None before the first.

        As long as one is lent, it is that one.
        """
        with self._lock:
            if self._lent is None:
                self._lent, self._lent_version = self._shown, self._version
            return self._lent

    def copy(self) -> Tensor | None:
        """For the thread: the newest model; None before the first."""
        with self._lock:
            return None if self._shown is None else self._shown.clone()

    def give_back(self) -> None:
        """For the thread: it is not looked at any more."""
        with self._lock:
            self._lent = None

    def correct(self, change: Tensor) -> None:
        """For the thread: this is to be added to the model."""
        with self._lock:
            self._pending += change
            self._waiting += 1
            self._made_of.append(self._lent_version)
            if self._shown is None:
                return
            if self._shown is self._lent:
                self._shown = self._free().copy_(self._shown)
            self._shown[: self._numel] += change

    def _free(self) -> Tensor:
        """A copy that nobody looks at or writes to."""
        used = {id(each) for each in (self._shown, self._lent, self._filled)}
        return next(each for each in self._spare if id(each) not in used)
