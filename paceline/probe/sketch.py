"""Short linear images of gradients, from which inner products can be estimated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from paceline.compiled import has_numba
from paceline.errors import SettingError
from paceline.probe.norms import FUSED_FROM, joined, portions

__all__ = ["SIZE", "LinearMap", "SignSketch", "Whole", "check_size", "map_of"]

# A prime: widths of layers are powers of two, and with a power of two here the heavy columns of a weight
# matrix would all fall into the same few buckets, which costs accuracy.
SIZE = 4093

# Rows handled at a time: one megabyte of float32, little enough to stay in a cache between the two passes over it,
# enough to make the calls themselves cheap.
CHUNK_ROWS = 64


def check_size(size: int) -> None:
    """Refuse a sketch without numbers."""
    if size < 1:
        raise SettingError(f"sketch size ({size}) must be at least 1; {SIZE} gives 2 % error, more gives less")


class LinearMap(Protocol):
    """A linear map of flat gradients that keeps inner products, at least on average."""

    size: int
    """How many numbers an image has."""
    dtype: torch.dtype
    """Of an image."""

    def add(self, out: Tensor, tensor: Tensor, offset: int, scale: float = 1.0) -> None:
        """Add ``scale`` times the image of a tensor that sits at flat position ``offset``."""

    def of(self, tensors: Sequence[Tensor], offsets: Sequence[int]) -> Tensor:
        """The image of the flat vector made of these tensors, and zeros elsewhere."""

    def add_rows(self, out: Tensor, rows: Tensor, offset: int) -> None:
        """Add to each row of ``out`` the image of that of ``rows``, which sits at flat position ``offset``."""

    def add_outer(self, out: Tensor, left: Tensor, right: Tensor, offset: int) -> None:
        """The same for outer products of rows: left right^T, flat."""


class SignSketch:
    """Random signs and folding: a linear map S from R^length to R^size with E <S(a), S(b)> = <a, b>.

    Cut the flat vector into rows of ``size`` numbers. Number c of row r is multiplied by a random sign s_rc and
    added to bucket c. Independent signs would need as much memory as the gradient; these are
    ``s_rc = rows[r] * columns[r + c]``, made of ``length / size`` and ``size + length / size`` independent
    signs. That is enough: in E[s_rc s_pc s_qd s_td] the factors of ``rows`` only survive if {r, p} = {q, t},
    and then those of ``columns`` only if c = d, since r + c = p + d and p + c = r + d cannot both hold
    otherwise. So mean and variance are exactly those of independent signs, for every a and b, however
    correlated the rows of a gradient are::

        Var ||S(g)||^2 = 2 sum_c (m_c^2 - sum_{i in bucket c} g_i^4) <= 2 sum_c m_c^2,  m_c = sum_{i in c} g_i^2

    which is about 2 ||g||^4 / size where the mass is spread evenly. (One sign for each column, reused by all
    rows, would not do: rows are then added up unchanged, and gradients are full of parallel rows.)

    On processors, with numba, long vectors take one pass. Memory: ``130 size + 2 length / size`` numbers, temporaries
    included; for :meth:`add_rows` without numba the signs of all numbers are multiplied out, and these are kept. The
    image has ``dtype``; half-precision gradients are converted on the way. The same seed gives the same map on every
    device.
    """

    def __init__(
        self,
        length: int,
        size: int = SIZE,
        seed: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if length < 0:
            raise SettingError(f"sketch length ({length}) is negative; pass the number of parameters")
        check_size(size)
        self.length = length
        self.size = size
        self.dtype = dtype
        rows = max(1, -(-length // size))
        generator = torch.Generator().manual_seed(seed)

        def signs(count: int) -> Tensor:
            return torch.randint(0, 2, (count,), generator=generator).mul_(2).sub_(1).to(device, dtype)

        self.rows = signs(rows)
        self.columns = signs(size + rows - 1)
        self._zeros = torch.zeros(size, dtype=dtype, device=device)
        self._buffer = torch.empty(min(CHUNK_ROWS, rows) * size, dtype=dtype, device=device)

    def add(self, out: Tensor, tensor: Tensor, offset: int, scale: float = 1.0) -> None:
        """Add to ``out`` ``scale`` times the image of a tensor that sits at flat position ``offset``."""
        self._add_run(out, [tensor], offset, scale)

    def of(self, tensors: Sequence[Tensor], offsets: Sequence[int]) -> Tensor:
        """The image of the flat vector made of these tensors, and zeros elsewhere."""
        out = torch.zeros_like(self._zeros)
        for run, start in _runs(tensors, offsets):
            self._add_run(out, run, start, 1.0)
        return out

    @torch.no_grad()
    def add_rows(self, out: Tensor, rows: Tensor, offset: int) -> None:
        """Add to each row of ``out`` the image of that of ``rows``, which sits at flat position ``offset``."""
        if _is_fused(out):
            self._add_fused(out, rows.new_ones(len(rows), 1), [rows], offset)
            return
        signed = rows * self._signs[offset : offset + rows.shape[1]]
        begin = offset % self.size
        first = min(self.size - begin, signed.shape[1])
        out[:, begin : begin + first] += signed[:, :first]
        whole = (signed.shape[1] - first) // self.size
        end = first + whole * self.size
        out += signed[:, first:end].view(len(out), whole, self.size).sum(1)
        rest = signed[:, end:]
        out[:, : rest.shape[1]] += rest

    @torch.no_grad()
    def add_outer(self, out: Tensor, left: Tensor, right: Tensor, offset: int) -> None:
        """The same for outer products of rows, left right^T, which are not formed where numba is installed."""
        if _is_fused(out):
            self._add_fused(out, left, [right], offset)
            return
        count = max(1, CHUNK_ROWS * self.size // (left.shape[1] * right.shape[1]))
        for image, *sides in zip(*(torch.split(each, count) for each in (out, left, right)), strict=True):
            self.add_rows(image, (sides[0].unsqueeze(2) * sides[1].unsqueeze(1)).flatten(1), offset)

    def _add_fused(self, out: Tensor, left: Tensor, rights: Iterable[Tensor], offset: int) -> None:
        """Add images of outer products that follow each other without a gap."""
        from paceline.probe.fused import add_outer  # takes a second, and not everybody has numba

        left = left.to(out.dtype).contiguous()
        image, factors, rows, columns = (each.numpy() for each in (out, left, self.rows, self.columns))
        for right in rights:
            add_outer(image, factors, right.to(out.dtype).contiguous().numpy(), rows, columns, offset)
            offset += left.shape[1] * right.shape[1]

    @cached_property
    def _signs(self) -> Tensor:
        """The sign of every number."""
        return (self.columns.unfold(0, self.size, 1) * self.rows.unsqueeze(1)).flatten()

    @torch.no_grad()
    def _add_run(self, out: Tensor, tensors: Iterable[Tensor], start: int, scale: float) -> None:
        """Add the image of tensors that follow each other without a gap from flat position ``start``."""
        if self.length >= FUSED_FROM and _is_fused(out):
            flat = (tensor.detach().reshape(1, -1) for tensor in tensors)
            self._add_fused(out.view(1, -1), out.new_full((1, 1), scale), flat, start)
            return
        row, begin = divmod(start, self.size)
        capacity = len(self._buffer)
        for pieces in portions(tensors, capacity, first=capacity - begin):
            count = sum(piece.numel() for piece in pieces)
            rows = -(-(begin + count) // self.size)
            self._fold(out, pieces, slice(row, row + rows), (begin, rows * self.size - begin - count), scale)
            row, begin = row + rows, 0

    def _fold(self, out: Tensor, pieces: list[Tensor], rows: slice, margins: tuple[int, int], scale: float) -> None:
        """Add the image of pieces that fill these rows but for margins at the beginning and at the end."""
        before, after = (self._zeros[:count] for count in margins)
        whole = joined([before, *pieces, after] if any(margins) else pieces).view(-1, self.size)
        signs = self.columns[rows.start : rows.stop + self.size - 1].unfold(0, self.size, 1)
        signed = torch.mul(whole, signs, out=self._buffer[: whole.numel()].view_as(whole))
        out.addmv_(signed.T, self.rows[rows], alpha=scale)


class Whole:
    """The identity in the place of a sketch: the image is the flat gradient itself, with ``length`` numbers."""

    def __init__(self, length: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        self.size = length
        self.dtype = dtype
        self._device = device

    @torch.no_grad()
    def add(self, out: Tensor, tensor: Tensor, offset: int, scale: float = 1.0) -> None:
        """Add to ``out`` ``scale`` times a tensor that sits at flat position ``offset``."""
        out[offset : offset + tensor.numel()].add_(tensor.reshape(-1), alpha=scale)

    @torch.no_grad()
    def add_rows(self, out: Tensor, rows: Tensor, offset: int) -> None:
        """Add ``rows`` to those of ``out``, from flat position ``offset``."""
        out[:, offset : offset + rows.shape[1]] += rows

    def add_outer(self, out: Tensor, left: Tensor, right: Tensor, offset: int) -> None:
        """The same for outer products of rows."""
        self.add_rows(out, (left.unsqueeze(2) * right.unsqueeze(1)).flatten(1), offset)

    def of(self, tensors: Sequence[Tensor], offsets: Sequence[int]) -> Tensor:
        """The flat vector made of these tensors, and zeros elsewhere."""
        out = torch.zeros(self.size, dtype=self.dtype, device=self._device)
        for tensor, offset in zip(tensors, offsets, strict=True):
            self.add(out, tensor, offset)
        return out


def map_of(parameters: Sequence[Tensor], size: int | None, seed: int) -> LinearMap:
    """The map for gradients of these parameters: a sketch of so many numbers, or all numbers."""
    device = parameters[0].device if parameters else torch.device("cpu")
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in parameters) else torch.float32
    length = sum(each.numel() for each in parameters)
    if size is None:
        return Whole(length, dtype=dtype, device=device)
    return SignSketch(length, size, seed, dtype=dtype, device=device)


def _is_fused(out: Tensor) -> bool:
    return out.is_cpu and has_numba()


def _runs(tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[tuple[list[Tensor], int]]:
    """Group tensors that follow each other without a gap, in any order given, with the start of each group."""
    runs: list[tuple[list[Tensor], int]] = []
    end = -1
    for offset, tensor in sorted(zip(offsets, tensors, strict=True), key=lambda pair: pair[0]):
        if offset == end:
            runs[-1][0].append(tensor)
        else:
            runs.append(([tensor], offset))
        end = offset + tensor.numel()
    return runs
