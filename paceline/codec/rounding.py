"""Lattice points in plain operations of torch, over pieces that stay in the cache.

A number is rounded to a multiple k s of a power of two s by adding 1.5 · 2^23 s to it: what single precision keeps of
that sum is the nearest multiple, and its bits, as an int32, are k and a constant. The constant is a multiple of 2^22,
which changes nothing modulo q. So an index, with that constant, is one addition away from a number, and a point is one
subtraction away from the index, on every processor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.codec.packing import pack, packed_bytes, unpack

__all__ = ["MAGIC", "decode", "encode", "scales_for"]

MAGIC = 12582912.0  # 1.5 · 2^23: whole numbers up to 2^22 away from it are told apart
FINEST = 2.0**-21  # lattice steps of the largest number of a block: indices stay below 2^22, with room for who is near
SMALLEST, LARGEST = 2.0**-100, 2.0**103  # lattice steps: 2^24 of them are a number, too
# Steps of the range that are not used: half a step for each of two roundings, twice, and the rounding of a shift.
SLACK = 2.6
CHUNK = 1 << 18  # numbers at a time: fewer, and calls take longer than what they do


def scales_for(reach: Tensor, largest: Tensor, bits: int) -> Tensor:
    """The distance s of two lattice points for each block, so that numbers up to ``reach`` apart are told apart.

    Of the right colour, the point nearest to the receiver's number is the right one if their indices are less than
    q / 2 apart. That takes s = 2 reach / (q - 2), and a little for arithmetic. It is not below what an index can count
    for numbers as large as ``largest``, and the next power of two, so that all divisions by it are exact. NaN where a
    number of the block is not finite, or the distance would be more than 2^103.
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
    shifts: Tensor | None,
) -> None:
    """Fill in lattice distances and check sums (the ``head``), codes, and ``points``, which must not be ``values``."""
    scales, digests = head
    scales.copy_(scales_for(reach, torch.zeros_like(reach), bits))
    highest, lowest = torch.empty_like(scales), torch.empty_like(scales)
    pieces = list(_pieces(values.numel(), block))
    room, spare = _room(values, block)

    def fill(some: Iterable[Piece]) -> None:
        zeros = _zeros(scales, MAGIC)
        for piece in some:
            rows, work, zero = piece.rows(values), piece.room(room), piece.blocks(zeros)
            torch.amax(rows, 1, out=piece.blocks(highest))
            torch.amin(rows, 1, out=piece.blocks(lowest))
            shift = None if shifts is None else piece.rows(shifts) * piece.blocks(scales).unsqueeze(1)
            index = _index(rows, zero, shift, work)
            _digest(index, bits, weights, piece.room(spare), piece.blocks(digests))
            pack(index.view(-1), bits, piece.codes(codes, bits))
            if points is not None:
                _write(work, zero, shift, piece.rows(points))

    fill(pieces)
    # Whether the largest number of a block needs a wider lattice is seen on the way; it seldom does.
    right = scales_for(reach, torch.maximum(highest, -lowest), bits)
    wider = right != scales
    if wider.any():
        scales.copy_(right)
        fill(piece for piece in pieces if piece.blocks(wider).any())


def decode(
    near: Tensor,
    bits: int,
    block: int,
    weights: Tensor,
    head: tuple[Tensor, Tensor],
    codes: Tensor,
    out: Tensor,
    apart: Tensor,
    shifts: Tensor | None,
) -> int:
    """Write the points and their distances from ``near``; gives the number of blocks that are wrong."""
    scales, digests = head
    half, mask = 1 << (bits - 1), (1 << bits) - 1
    found, highest, lowest = torch.empty_like(digests), torch.empty_like(apart), torch.empty_like(apart)
    zeros, leasts = _zeros(scales, MAGIC), _zeros(scales, MAGIC - half)
    room, spare = _room(near, block)
    for piece in _pieces(near.numel(), block):
        rows, work, points = piece.rows(near), piece.room(room), piece.rows(out)
        shift = None if shifts is None else piece.rows(shifts) * piece.blocks(scales).unsqueeze(1)
        least = _index(rows, piece.blocks(leasts), shift, work)  # of the q indices that it may be
        index = unpack(piece.codes(codes, bits), bits, rows.numel()).view_as(rows)
        index.sub_(least).bitwise_and_(mask).add_(least)
        _digest(index, bits, weights, piece.room(spare), piece.blocks(found))
        _write(index.view(torch.float32), piece.blocks(zeros), shift, points)
        torch.sub(points, rows, out=work)
        torch.amax(work, 1, out=piece.blocks(highest))
        torch.amin(work, 1, out=piece.blocks(lowest))
    torch.maximum(highest, -lowest, out=apart)
    return int(((found != digests) | ~apart.isfinite()).sum())


class Piece(NamedTuple):
    """Some blocks of the same length: from which to which, and from which number to which."""

    first: int
    last: int
    begin: int
    end: int

    def rows(self, numbers: Tensor) -> Tensor:
        """Its part of all numbers, a row for each block."""
        return numbers[self.begin : self.end].view(self.last - self.first, -1)

    def blocks(self, each: Tensor) -> Tensor:
        """Its part of what there is for each block."""
        return each[self.first : self.last]

    def room(self, room: Tensor) -> Tensor:
        """As much of a room as it takes."""
        return room[: self.end - self.begin].view(self.last - self.first, -1)

    def codes(self, payload: Tensor, bits: int) -> Tensor:
        """Its part of the codes: pieces but for the last are whole bytes."""
        at = packed_bytes(self.begin, bits)
        return payload[at : at + packed_bytes(self.end - self.begin, bits)]


def _room(like: Tensor, block: int) -> tuple[Tensor, Tensor]:
    size = min(like.numel(), max(CHUNK, block))
    return like.new_empty(size), like.new_empty(size, dtype=torch.int32)


def _pieces(numel: int, block: int) -> Iterator[Piece]:
    """Whole blocks, then a short one if there is a rest."""
    step = max(CHUNK // block, 1)
    whole = numel // block
    for first in range(0, whole, step):
        last = min(first + step, whole)
        yield Piece(first, last, first * block, last * block)
    if whole * block < numel:
        yield Piece(whole, whole + 1, whole * block, numel)


def _zeros(scales: Tensor, zero: float) -> Tensor:
    """What is added to the numbers of each block so that their bits are indices, counted from there."""
    return (scales * zero).unsqueeze(1)


def _index(rows: Tensor, zero: Tensor, shifts: Tensor | None, work: Tensor) -> Tensor:
    """The nearest indices, counted from ``zero``, as numbers in ``work``, and their bits as int32."""
    if shifts is None:
        return torch.add(rows, zero, out=work).view(torch.int32)
    return torch.add(rows, shifts, out=work).add_(zero).view(torch.int32)


def _digest(index: Tensor, bits: int, weights: Tensor, room: Tensor, out: Tensor) -> None:
    """Sum of what does not travel times weights modulo 2^32, of each row."""
    torch.bitwise_right_shift(index, bits, out=room)
    torch.sum(room.mul_(weights[: room.shape[1]]), 1, dtype=torch.int32, out=out)


def _write(index: Tensor, zero: Tensor, shifts: Tensor | None, out: Tensor) -> None:
    """The points of indices that are counted from ``zero``."""
    torch.sub(index, zero, out=out)
    if shifts is not None:
        out.sub_(shifts)
