"""Buffers that change in training (BatchNorm's running statistics): averaged with the gradients.

Every worker updates its own copy from its own examples; at each synchronisation they become the average of all
copies, weighted by examples. What travels is the change since the last synchronisation, so a buffer that did not
change is not rounded either. A buffer takes part once it has changed on any worker: constants (masks, position
tables) cost one number. Buffers that are not floating point (counters), or that change their shape (caches), stay each
worker's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.errors import SettingError
from paceline.group import Group
from paceline.replica import Replica
from paceline.sync.notes import Numbers

__all__ = ["BufferAverage"]


class BufferAverage:
    """Keeps the floating-point buffers of a replica equal to the weighted average over all workers."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._names = [name for name, buffer in replica.buffers() if buffer.is_floating_point()]
        self.live: list[str] = []
        """The buffers that are known to change."""
        self._base: dict[str, Tensor] = {}
        self._new: list[str] = []
        self.share = 0.0
        """This worker's part of the examples of the step: set it before the exchange."""
        self.whole: Callable[[], float] = lambda: 1.0
        """What the parts of all workers add up to, known when the sum is read."""
        self.reset()

    @property
    def numel(self) -> int:
        """A flag for each buffer, and the values of those that are known to change."""
        return len(self._names) + sum(self._base[name].numel() for name in self.live)

    def write(self, out: Numbers) -> None:
        """The flags, and this worker's part of the average change."""
        if not self._names:
            return
        buffers = self._buffers()
        # By value: BatchNorm's kernels write running statistics without raising the tensors' version.
        changed = [name in self.live or self._has_changed(name, buffers[name]) for name in self._names]
        parts = [self._change(name, buffers[name]).cpu().numpy() for name in self.live]
        out[:] = np.concatenate([changed, *parts])

    def read(self, summed: Numbers) -> None:
        """Apply the average change; note which other buffers have begun to change."""
        if not self._names:
            return
        flags, changes = summed[: len(self._names)], summed[len(self._names) :]
        self._apply(self.live, torch.from_numpy(changes).clone())
        self._new = [name for name, flag in zip(self._names, flags, strict=True) if flag > 0 and name not in self.live]

    def finish(self, group: Group, what: str) -> int:
        """Average the buffers that changed for the first time, in a collective of their own, this once.

        Gives the bytes that this worker sent for it.
        """
        if not self._new:
            return 0
        buffers = self._buffers()
        flat = torch.cat([self._change(name, buffers[name]) for name in self._new]).to(group.device)
        group.all_reduce(flat, what)
        self._apply(self._new, flat)
        self.live += self._new
        self._new = []
        return group.bytes_to_sum(flat)

    def state_dict(self) -> dict[str, Tensor]:
        """The last common values."""
        return dict(self._base)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take them back."""
        self._base = {name: base.clone() for name, base in state.items()}

    def reset(self) -> None:
        """Take the present values as common to all workers."""
        self._base = {name: buffer.detach().clone() for name, buffer in self._buffers().items()}

    def _buffers(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self._replica.buffers() if name in self._names}

    def _has_changed(self, name: str, buffer: Tensor) -> bool:
        base = self._base[name]
        return buffer.shape == base.shape and not torch.equal(buffer, base)

    def _change(self, name: str, buffer: Tensor) -> Tensor:
        base = self._base[name]
        if buffer.shape != base.shape:
            raise SettingError(
                f"the buffer {name} was averaged with shape {tuple(base.shape)} and now has {tuple(buffer.shape)}; "
                "keep what changes its shape in a plain attribute instead of a buffer"
            )
        if not self.share:  # nothing times infinity is not nothing
            return torch.zeros(base.numel(), dtype=torch.float32, device=base.device)
        return ((buffer.double() - _start(base)) * self.share).reshape(-1).float()

    def _apply(self, names: Sequence[str], changes: Tensor) -> None:
        buffers = self._buffers()
        whole = self.whole() or 1.0  # nobody had examples: nothing has changed
        with torch.no_grad():
            for name, change in zip(names, torch.split(changes, [self._base[n].numel() for n in names]), strict=True):
                base = self._base[name]
                base.copy_(_start(base) + change.to(base.device).double().view(base.shape) / whole)
                buffers[name].copy_(base)


def _start(base: Tensor) -> Tensor:
    """What changes are counted from: the last common value, or zero where that is infinite."""
    return torch.where(base.isfinite(), base, 0.0).double()
