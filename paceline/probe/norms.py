"""Norms and inner products of long vectors, accurate in single precision and with short temporaries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from paceline.compiled import has_numba

__all__ = ["FUSED_FROM", "inner_products", "joined", "norm", "portions", "row_sqnorms", "sqnorm"]

# A single-precision sum over 10^7 numbers on the CPU is off by up to 3e-3, which matters where
# sum n_i ||g_i||^2 - N ||gbar||^2 nearly cancels. So only the numbers of a row are summed in single precision.
ROW = 1 << 9

# A dot product sums in many lanes, so that more numbers do as little harm.
BLOCK = 1 << 17

# Numbers that are looked at with one call: few calls, and short temporaries.
PIECE = 1 << 17

# Products of rows are sums of so many numbers in single precision: off by 1e-5 at most.
SHORT = 1 << 15

# Gradients of at least so many numbers go through numba's one pass: a sketch takes a fifth of the time for a million of
# them, half for a hundred thousand; below, its import (a second) and its calls are not repaid.
FUSED_FROM = 50_000

WIDE = (torch.float32, torch.float64)


def portions(tensors: Iterable[Tensor], limit: int, first: int | None = None) -> Iterator[list[Tensor]]:
    """Cut the numbers of all tensors, one after the other, into portions of ``limit`` (the last may be shorter).

    Each is given as the list of its pieces, which are views where the tensors are contiguous. The first portion
    has ``first`` numbers if that is given.
    """
    room = limit if first is None else first
    pieces: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel() < room:  # the common case of many small tensors must cost next to nothing
            pieces.append(tensor)
            room -= tensor.numel()
            continue
        for part in _flat(tensor, limit):
            flat = part
            while len(flat) >= room:
                yield [*pieces, flat[:room]]
                flat = flat[room:]
                pieces, room = [], limit
            if len(flat):
                pieces.append(flat)
                room -= len(flat)
    if pieces:
        yield pieces


def joined(pieces: list[Tensor]) -> Tensor:
    """One flat tensor of all pieces: a copy, or a view if there is only one contiguous piece."""
    # One call for all, where views and torch.cat would take one call for each; half the time for a small CNN.
    return torch._C._nn.flatten_dense_tensors(pieces)


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """Euclidean norm of all tensors together, in double precision, left on their device."""
    rows: list[Tensor] = []
    for flat in _vectors(tensors):
        even = len(flat) // ROW * ROW
        rows += [torch.linalg.vector_norm(flat[:even].view(-1, ROW), dim=1), flat[even:]]
    if not rows:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(torch.cat(rows), dtype=torch.float64)
    return total


def row_sqnorms(rows: Tensor) -> Tensor:
    """The squared norm of each row, in double precision."""
    even = rows.shape[1] // ROW * ROW
    pieces = torch.linalg.vector_norm(rows[:, :even].view(len(rows), even // ROW, ROW), dim=2)
    return torch.cat([pieces, rows[:, even:]], 1).double().square().sum(1)


def sqnorm(tensors: Iterable[Tensor], double: bool = False) -> float:
    """The squared norm, at once: for a small model on a CPU one call, where :func:`norm` takes six on cold caches.

    ``double`` is for what all workers compute alike and decide by: in single precision, processors of different kinds
    come to sums that differ in the seventh digit, which is enough to round a batch differently now and then.
    """
    total, elsewhere = 0.0, []
    for flat in _vectors(tensors):
        if not flat.is_cpu:
            elsewhere.append(flat)
            continue
        if double and len(flat) >= FUSED_FROM and flat.dtype == torch.float32 and has_numba():
            from paceline.probe.fused import sum_of_squares  # takes a second, and not everybody has numba

            total += sum_of_squares(flat.detach().numpy())
            continue
        for part in (flat,) if len(flat) <= BLOCK else torch.split(flat, BLOCK):
            numbers = part.double() if double else part
            total += torch.dot(numbers, numbers).item()
    if elsewhere:  # not exercised by the tests, which have no GPU: one wait for the device
        norms = [torch.linalg.vector_norm(flat, dtype=torch.float64) for flat in elsewhere]
        length = float(torch.linalg.vector_norm(torch.stack(norms)))
        total += length * length
    return total


def _vectors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The numbers of all tensors as flat ones in at least single precision."""
    small: list[Tensor] = []
    for tensor in tensors:
        # A pass over a long vector as it is; short ones are laid together first, to save calls.
        if tensor.numel() >= SHORT and tensor.dtype in WIDE and tensor.is_contiguous():
            yield tensor if tensor.dim() == 1 else tensor.view(-1)
        else:
            small.append(tensor)
    for pieces in portions(small, PIECE):
        flat = joined(pieces)
        yield flat if flat.dtype in WIDE else flat.float()


def inner_products(vectors: Tensor) -> Tensor:
    """All inner products of the rows of ``vectors`` (U x length), as a U x U double-precision tensor."""
    products = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for part in torch.split(vectors, SHORT, dim=1):
        products += (part @ part.T).to("cpu", torch.float64)
    return products


def _flat(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """The tensor's numbers in order, as flat tensors; at most ``limit`` of them are copied at a time."""
    if tensor.is_contiguous():
        yield tensor.view(-1)
    elif tensor.numel() <= limit or tensor.dim() == 1:
        yield tensor.reshape(-1)
    elif tensor[0].numel() <= limit:
        for part in torch.split(tensor, limit // tensor[0].numel()):
            yield part.reshape(-1)
    else:
        for part in tensor:
            yield from _flat(part, limit)
