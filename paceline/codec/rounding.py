"""Lattice points in plain operations of torch, over pieces that stay in the cache.

A number is rounded by adding 1.5 · 2^23 to it: what single precision keeps of that sum is the nearest whole number, and
its bits, as an int32, are that number and a constant. The constant is a multiple of 2^22, which changes nothing modulo
q. So an index, with that constant, is one addition away from a float, on every processor.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.codec.packing import pack, packed_bytes, unpack

__all__ = ["MAGIC", "decode", "encode", "scales_for"]

MAGIC = 12582912.0  # 1.5 · 2^23: whole numbers up to 2^22 away from it are told apart
FINEST = 2.0**-21  # lattice steps of the largest number of a block: indices stay below 2^22, with room for who is near
SMALLEST, LARGEST = 2.0**-100, 2.0**127  # lattice steps: their inverses are numbers, too
# Steps of the range that are not used: half a step for each of two roundings, twice, and the rounding of a shift.
SLACK = 2.6
CHUNK = 1 << 17  # numbers at a time: fewer, and calls take longer than what they do


def scales_for(reach: Tensor, largest: Tensor, bits: int) -> Tensor:
    """The distance s of two lattice points for each block, so that numbers up to ``reach`` apart are told apart.

    Of the right colour, the point nearest to the receiver's number is the right one if their indices are less than
    q / 2 apart. That takes s = 2 reach / (q - 2), and a little for arithmetic. It is not below what an index can count
    for numbers as large as ``largest``, and the next power of two, so that all divisions by it are exact. NaN where a
    number of the block, or what it takes, is not finite.
    """
    scales = torch.maximum(2 * reach / ((1 << bits) - SLACK), largest * FINEST).clamp(min=SMALLEST)
    power = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(scales <= LARGEST, power, torch.nan)


def encode(
    values: Tensor,
    reach: Tensor,
    bits: int,
    block: int,
    weights: Tensor,
    head: tuple[Tensor, Tensor],
    codes: Tensor,
    points: Tensor | None,
    shifts: torch.Generator | None,
) -> None:
    """Fill in lattice distances and check sums (the ``head``), codes, and the points if they are asked for."""
    scales, digests = head
    room, spare = _room(values, block)
    at = 0
    for first, last, begin, end in _pieces(values.numel(), block):
        rows = values[begin:end].view(last - first, -1)
        scale = scales_for(reach[first:last], _largest(rows), bits)
        scales[first:last] = scale
        work, other = room[: end - begin].view_as(rows), spare[: end - begin].view_as(rows)
        shift = _shift(shifts, rows)
        index = _round(rows, scale, shift, MAGIC, work)
        digests[first:last] = _digest(index, bits, weights, other)
        size = packed_bytes(end - begin, bits)
        pack(index.view(-1), bits, codes[at : at + size])
        if points is not None:
            _write(work, shift, scale, points[begin:end].view_as(rows))
        at += size


def decode(
    near: Tensor,
    bits: int,
    block: int,
    weights: Tensor,
    head: tuple[Tensor, Tensor],
    codes: Tensor,
    out: Tensor,
    apart: Tensor,
    shifts: torch.Generator | None,
) -> int:
    """Write the points and their distances from ``near``; gives the number of blocks that are wrong."""
    scales, digests = head
    room, spare = _room(near, block)
    half, mask, wrong, at = 1 << (bits - 1), (1 << bits) - 1, 0, 0
    for first, last, begin, end in _pieces(near.numel(), block):
        rows, scale = near[begin:end].view(last - first, -1), scales[first:last]
        work, other = room[: end - begin].view_as(rows), spare[: end - begin].view_as(rows)
        shift = _shift(shifts, rows)
        lowest = _round(rows, scale, shift, MAGIC - half, work)  # of the q indices that it may be
        size = packed_bytes(end - begin, bits)
        index = unpack(codes[at : at + size], bits, end - begin).view_as(rows)
        index.sub_(lowest).bitwise_and_(mask).add_(lowest)
        same = _digest(index, bits, weights, other) == digests[first:last]
        points = out[begin:end].view_as(rows)
        _write(index.view(torch.float32), shift, scale, points)
        apart[first:last] = _largest(torch.sub(points, rows, out=work))
        wrong += last - first - int((same & apart[first:last].isfinite()).sum())
        at += size
    return wrong


def _room(like: Tensor, block: int) -> tuple[Tensor, Tensor]:
    size = min(like.numel(), max(CHUNK, block))
    return like.new_empty(size), like.new_empty(size, dtype=torch.int32)


def _pieces(numel: int, block: int) -> Iterator[tuple[int, int, int, int]]:
    """First and last block of each piece, and its numbers: whole blocks, then a short one if there is a rest."""
    step = max(CHUNK // block, 1)
    whole = numel // block
    for first in range(0, whole, step):
        last = min(first + step, whole)
        yield first, last, first * block, last * block
    if whole * block < numel:
        yield whole, whole + 1, whole * block, numel


def _shift(generator: torch.Generator | None, rows: Tensor) -> Tensor | None:
    """By how much of a step the lattice lies elsewhere for each number."""
    return None if generator is None else torch.rand(rows.shape, generator=generator, dtype=rows.dtype).to(rows.device)


def _largest(rows: Tensor) -> Tensor:
    """The largest size in each row; NaN if there is one. (Both in one pass take ten times as long.)"""
    return torch.maximum(rows.amax(1), -rows.amin(1))


def _round(rows: Tensor, scale: Tensor, shift: Tensor | None, more: float, work: Tensor) -> Tensor:
    """The nearest indices plus ``more``, as floats in ``work``, and their bits as int32."""
    torch.mul(rows, scale.reciprocal().unsqueeze(1), out=work)
    if shift is not None:
        work.add_(shift)
    return work.add_(more).view(torch.int32)


def _digest(index: Tensor, bits: int, weights: Tensor, room: Tensor) -> Tensor:
    """Sum of what does not travel times weights modulo 2^32, of each row."""
    torch.bitwise_right_shift(index, bits, out=room)
    return room.mul_(weights[: room.shape[1]]).sum(1, dtype=torch.int32)


def _write(index: Tensor, shift: Tensor | None, scale: Tensor, out: Tensor) -> None:
    """The points of indices, which have MAGIC added to them."""
    torch.sub(index, MAGIC, out=out)
    if shift is not None:
        out.sub_(shift)
    out.mul_(scale.unsqueeze(1))
