"""Workers that exchange tensors with each other: all of them, or those of one site."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import WorkersDisagree

if TYPE_CHECKING:
    from paceline.fleet import Fleet

__all__ = ["Group", "Part", "Work"]

# Two workers swap tensors of up to so many bytes whole: one message each way, where gloo's ring takes several in turn.
# Of larger ones the ring adds up one part while the next is under way. Both send as many bytes.
SWAPPED = 1 << 21


class Work(Protocol):
    """Something under way between workers: a collective of torch's, say."""

    def wait(self, timeout: timedelta) -> bool:
        """Raises a RuntimeError if it takes longer, or has failed."""

    def is_completed(self) -> bool:
        """Whether it is over, well or not."""


class Group(ABC):
    """Collectives, each with a deadline; a group of one has nothing to do."""

    rank: int
    """This worker's number in the group."""
    size: int
    device: torch.device
    """Where tensors must be to travel."""
    first: int = 0
    """The rank, among all workers, of the group's rank 0."""
    handle: dist.ProcessGroup | None = None
    """Torch's name for the group; None for all workers."""

    @abstractmethod
    def wait(self, start: Callable[[], Work], what: str) -> None:
        """Start a collective and wait for it, not longer than the deadline."""

    @abstractmethod
    def agree(self, items: dict[str, str]) -> None:
        """Compare settings between workers; a difference is an error."""

    @abstractmethod
    def gather(self, blob: bytes, what: str) -> list[bytes]:
        """Every worker's bytes, by rank, on every worker: for small, rare things."""

    def bytes_to_sum(self, tensor: Tensor) -> int:
        """What each worker sends to sum such a tensor: every number once on the way to be added, once on the way back.

        So do all algorithms that use their links well; each worker adds up one part of the numbers.
        """
        return 2 * (self.size - 1) * tensor.numel() * tensor.element_size() // self.size

    def all_reduce(self, tensor: Tensor, what: str) -> None:
        """Sum a tensor over the group, in place."""
        if self.size == 1:
            return
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if self.swaps(real):
            sent = real.view(-1).cpu()  # it may be on a GPU, and the group gloo's (not exercised by the tests)
            received = torch.empty_like(sent)
            self.swap(sent, received, what)
            real.add_(received.view(real.shape).to(real.device))
        else:
            # What ``dist.all_reduce`` calls, without its 30 µs of bookkeeping.
            self.wait(lambda: self._torch_group.allreduce([real], dist.AllreduceOptions()), what)

    def swaps(self, tensor: Tensor) -> bool:
        """Whether such a tensor is summed by a swap: the same on both workers, wherever they have theirs."""
        return self.size == 2 and self.device.type == "cpu" and 0 < tensor.nbytes <= SWAPPED

    def swap(self, sent: Tensor, received: Tensor, what: str) -> None:
        """Two workers give each other a flat tensor; both add the same two numbers then, and get the same bits."""
        self.pair_up(1 - self.rank, sent, received, what)

    def pair_up(self, other: int, sent: Tensor, received: Tensor, what: str) -> None:
        """Every worker gives a flat tensor to one other, which gives one of the same length back.

        Or gives it to itself, where the number of workers is odd. All workers call it together.
        """
        parts = [0] * self.size
        parts[other] = len(sent)
        self.wait(lambda: self._torch_group.alltoall_base(received, sent, parts, parts, dist.AllToAllOptions()), what)

    @property
    def _torch_group(self) -> dist.ProcessGroup:
        return self.handle or dist.distributed_c10d._get_default_group()

    def broadcast(self, tensor: Tensor, what: str) -> None:
        """Copy rank 0's tensor to all, in place."""
        if self.size > 1:
            self.wait(lambda: dist.broadcast(tensor, src=self.first, group=self.handle, async_op=True), what)

    def all_to_all(self, received: Tensor, sent: Tensor, what: str) -> None:
        """Part r of ``sent`` goes to rank r; part r of ``received`` is what rank r has sent here."""
        self.wait(lambda: dist.all_to_all_single(received, sent, group=self.handle, async_op=True), what)

    def all_gather(self, received: Tensor, sent: Tensor, what: str) -> None:
        """``received`` becomes what all have sent, by rank."""
        parts = list(received.chunk(self.size))  # what takes one tensor has another name in each version of torch
        self.wait(lambda: dist.all_gather(parts, sent, group=self.handle, async_op=True), what)

    def broadcast_bytes(self, blob: bytes, what: str) -> bytes:
        """Give rank 0's bytes to all."""
        if self.size == 1:
            return blob
        length = torch.tensor([len(blob)], dtype=torch.int64, device=self.device)
        self.broadcast(length, what)
        data = torch.empty(int(length.item()), dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            _fill(data, blob)
        if data.numel():
            self.broadcast(data, what)
        return data.cpu().numpy().tobytes()

    def share_bytes(self, blob: bytes, what: str) -> list[bytes]:
        """Every worker's bytes, by rank, on every worker: in two collectives."""
        if self.size == 1:
            return [blob]
        own = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        own[self.rank] = len(blob)
        self.all_reduce(own, what)
        sizes: list[int] = own.tolist()
        data = torch.zeros(max(1, *sizes), dtype=torch.uint8, device=self.device)
        _fill(data, blob)
        found = data.new_empty(self.size * len(data))
        self.all_gather(found, data, what)
        rows = found.cpu().view(self.size, -1)
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def collect_bytes(self, blob: bytes, what: str) -> list[bytes]:
        """Every worker's bytes, by rank, on rank 0; nothing on the others."""
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(blob)
        self.all_reduce(lengths, what)
        sizes: list[int] = lengths.tolist()
        if self.size == 1 or not any(sizes):
            return [blob] * self.size
        data = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        _fill(data, blob)
        found = [torch.empty_like(data) for _ in sizes] if self.rank == 0 else None
        self.wait(lambda: dist.gather(data, found, dst=self.first, group=self.handle, async_op=True), what)
        return [each[:size].cpu().numpy().tobytes() for each, size in zip(found or [], sizes, strict=False)]


class Part(Group):
    """Some of the workers. All workers must make it, in the same order, also those that are not in it."""

    def __init__(self, fleet: Fleet, ranks: list[int]) -> None:
        self._fleet, self._ranks = fleet, ranks
        self.device = fleet.device
        self.size = len(ranks)
        self.first = ranks[0]
        self.rank = ranks.index(fleet.rank) if fleet.rank in ranks else -1
        """-1 for who is not in it."""
        self.handle = dist.new_group(ranks, timeout=fleet.torch_limit) if self.size > 1 else None

    def wait(self, start: Callable[[], Work], what: str) -> None:
        """As the whole fleet does."""
        self._fleet.wait(start, what)

    def gather(self, blob: bytes, what: str) -> list[bytes]:
        """Every member's bytes, by rank in the group."""
        return self.share_bytes(blob, what)

    def agree(self, items: dict[str, str]) -> None:
        """Compare settings in the group; a difference is an error that names the item and the workers."""
        if self.size == 1:
            return
        for what, value in items.items():
            own = torch.tensor([zlib.crc32(value.encode())], device=self.device)
            found = own.new_empty(self.size)
            self.all_gather(found, own, f"the others' {what}")
            other = [rank for rank, theirs in zip(self._ranks, found.tolist(), strict=True) if theirs != int(own)]
            if other:
                raise WorkersDisagree(
                    f"the {what} of ranks {other} differs from that of rank {self._fleet.rank} ({value}); start all "
                    "workers with the same code, arguments and data"
                )

    def close(self) -> None:
        """Give its connections back."""
        if self.handle is not None and self.rank >= 0 and dist.is_initialized():
            dist.destroy_process_group(self.handle)
        self.handle = None


def _fill(data: Tensor, blob: bytes) -> None:
    """Write bytes to the beginning of a tensor of bytes."""
    if blob:
        data[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
