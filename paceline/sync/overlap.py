"""Working with a module that the user has wrapped in ``DistributedDataParallel``."""

# No postponed annotations here: DDP compares the hook's annotation with its own class.

import time
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import SettingError
from paceline.probe import Probe

__all__ = ["Overlap"]


class _HookState:
    """What the communication hook of one DDP module reads. DDP keeps its first hook for ever, so this is replaced."""

    def __init__(self) -> None:
        self.probe: Probe | None = None
        self.ready_at = 0.0
        self.bytes_sent = 0


_hooked: WeakKeyDictionary[DistributedDataParallel, _HookState] = WeakKeyDictionary()


class Overlap:
    """Sees DDP's gradients before they are averaged, and when this worker's own work was done.

    The hook averages as DDP does without one. If the user has set a hook, theirs stays; then the probe cannot see the
    last micro-batch (an error if it has to), communication counts as computation in the clock, and how long this worker
    was busy is not known. Nor is it on a GPU, where the hook is called long before the gradients are there.
    """

    def __init__(self, ddp: DistributedDataParallel, probe: Probe) -> None:
        self._ddp = ddp
        self._state = _hooked.get(ddp) or _HookState()
        self.sees = True
        self._on_cpu = all(p.device.type == "cpu" for p in ddp.parameters())
        if ddp not in _hooked:
            hooks_before = len(ddp._comm_hooks)
            try:
                ddp.register_comm_hook(self._state, _average)
                _hooked[ddp] = self._state
            except RuntimeError:  # DDP takes one hook only
                del ddp._comm_hooks[hooks_before:]
                self.sees = False
        if probe.active and not self.sees:
            raise SettingError(
                "the DistributedDataParallel module has a communication hook of its own, so the probe cannot see "
                "gradients before they are averaged; remove the hook, give Run the bare module, or use roles that do "
                "not ask the probe"
            )
        self._probe = probe if probe.active else None
        self._state.probe = self._probe

    def begin(self) -> None:
        """A step begins."""
        self._state.ready_at = 0.0
        self._state.bytes_sent = 0

    def match_forward(self) -> None:
        """Take part in what the others' forward pass exchanges, on a worker that has no examples for one.

        DDP agrees on its buckets in the forward pass after the first backward pass, and broadcasts buffers in the first
        one after each synchronisation.
        """
        with self._ddp.no_sync(), torch.enable_grad():
            self._ddp._post_forward(self._ddp._pre_forward())  # type: ignore[no-untyped-call]

    @property
    def times(self) -> bool:
        """Whether it can tell this worker's own work from the wait for others."""
        return self.sees and self._on_cpu

    @property
    def ready_at(self) -> float:
        """When the last gradient was ready (``time.perf_counter``); 0 if not known."""
        return self._state.ready_at

    @property
    def bytes_sent(self) -> int:
        """Bytes that were handed to the network layer in this step."""
        return self._state.bytes_sent

    def detach(self) -> None:
        """Let the hook do nothing but average, unless it serves another run by now."""
        if self._state.probe is self._probe:
            self._state.probe = None


def _average(state: _HookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    if state.probe is not None:
        parameters = cast(list[nn.Parameter], bucket.parameters())
        state.probe.see_bucket(parameters, bucket.gradients())
    if bucket.is_last():
        state.ready_at = time.perf_counter()
    values = bucket.buffer()
    workers = dist.get_world_size()
    state.bytes_sent += 2 * (workers - 1) * values.numel() * values.element_size() // workers
    values.mul_(1.0 / workers)
    sum_of_all: torch.futures.Future[list[Tensor]] = dist.all_reduce(values, async_op=True).get_future()
    return sum_of_all.then(lambda done: done.value()[0])
