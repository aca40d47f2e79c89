"""A few bits for each number of a model, for a receiver that has nearly the same model (Davies et al. 2021).

Every number is rounded to the nearest point k s of a lattice, and only k modulo q = 2^bits travels. The receiver takes
the point of that colour that is nearest to its own number. So the error depends on how far the two models are apart,
not on how large they are. No scale of the numbers is lost, and nothing has to be remembered of any partner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.codec.packing import pack, packed_bytes, unpack
from paceline.errors import SettingError

__all__ = ["Lattice", "refuse_lattice", "scales_for"]

CHUNK = 1 << 15  # numbers at a time: what is computed on the way stays in the cache
FINEST = 2.0**-24  # of the largest number of a block: single precision has no more digits, and indices fit into int32
SLACK = 1.001  # lattice steps of the range that rounding may use: half a step on each side, and a little for arithmetic
FARTHEST = 1 << 30  # periods that are told apart
SEED = 9543  # of the weights in the digest: the same everywhere


def scales_for(reach: Tensor, largest: Tensor, bits: int) -> Tensor:
    """The distance s of two lattice points for each block, so that numbers up to ``reach`` apart are told apart.

    Of the right colour, the point nearest to the receiver's number is the right one if they are less than q s / 2
    apart, and rounding may have moved it by s / 2: s = 2 reach / (q - 1), with a little room for arithmetic. It is not
    below what single precision can count for numbers as large as ``largest``. NaN where a number of the block is not
    finite.
    """
    scales = torch.maximum(2 * reach / ((1 << bits) - SLACK), largest * FINEST)
    tiny = torch.finfo(torch.float32).tiny
    return torch.where(largest.isfinite(), scales.clamp(min=tiny), torch.nan)


@dataclass(frozen=True)
class Lattice:
    """``bits`` for each number, and 8 bytes for each block of numbers: the lattice distance and a check sum.

    The check sum is of what does not travel, the indices without their lowest bits: a receiver whose own numbers are
    too far away finds other ones, and knows that it does. A single wrong number is always found, and so are two that
    are off by one period; of several others all but about one case in 2^31.

    Args:
        bits: 2 to 16.
        block: numbers that share a lattice distance.
        dithered: shift the lattice at random, by a seed that both sides know: then the error has mean zero whatever
            the number is, and is larger.
    """

    bits: int = 8
    block: int = 4096
    dithered: bool = False

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 2 <= self.bits <= 16:
            raise SettingError(
                f"Lattice: bits ({self.bits!r}) must be a whole number from 2 to 16; use Identity for 32"
            )
        if type(self.block) is not int or self.block < 64 or self.block % 8:
            raise SettingError(f"Lattice: block ({self.block!r}) must be a multiple of 8, and at least 64")

    def blocks(self, numel: int) -> int:
        """How many blocks so many numbers are; the last may be short."""
        return -(-numel // self.block)

    def bytes_for(self, numel: int) -> int:
        """The length of a payload."""
        return 8 * self.blocks(numel) + packed_bytes(numel, self.bits)

    def encode(self, values: Tensor, reach: Tensor, seed: int = 0) -> Tensor:
        """Bytes from which anybody whose numbers are at most ``reach`` (one for each block) away can decode these."""
        numel, blocks = values.numel(), self.blocks(values.numel())
        payload = torch.empty(self.bytes_for(numel), dtype=torch.uint8, device=values.device)
        scales, digests = self._head(payload, blocks)
        codes = payload[8 * blocks :]
        weights = _weights(self.block, values.device)
        shifts = self._shifts(seed)
        at = 0
        for first, last, begin, end in self._chunks(numel):
            rows = values[begin:end].view(last - first, -1)
            scale = scales_for(reach[first:last], rows.abs().amax(1), self.bits)
            scales[first:last] = scale
            points = rows.double().div_(scale.unsqueeze(1))
            if shifts is not None:
                points += self._shift(shifts, rows)
            indices = points.round_().nan_to_num_(0.0).int()
            digests[first:last] = _digest(indices >> self.bits, weights)
            size = packed_bytes(end - begin, self.bits)
            pack((indices & ((1 << self.bits) - 1)).view(-1), self.bits, codes[at : at + size])
            at += size
        return payload

    def decode(self, payload: Tensor, near: Tensor, out: Tensor, apart: Tensor | None = None, seed: int = 0) -> int:
        """Write the lattice points to ``out``, seen from ``near``, the receiver's own numbers.

        Gives the number of blocks in which some were too far away, so that ``out`` is not what was sent. ``apart`` gets
        the largest distance of ``out`` from ``near`` in each block. With ``near`` the very numbers that were encoded,
        the points are those that any receiver gets.
        """
        numel, blocks = near.numel(), self.blocks(near.numel())
        if payload.numel() != self.bytes_for(numel):
            raise SettingError(
                f"a payload of {payload.numel()} bytes is not one of {numel} numbers, for which {self!r} makes "
                f"{self.bytes_for(numel)}; decode with the codec and the length that it was encoded with"
            )
        scales, digests = self._head(payload[: 8 * blocks].clone(), blocks)  # it may begin where no float32 can
        codes = payload[8 * blocks :]
        weights = _weights(self.block, near.device)
        shifts = self._shifts(seed)
        colours, wrong, at = float(1 << self.bits), 0, 0
        for first, last, begin, end in self._chunks(numel):
            size = packed_bytes(end - begin, self.bits)
            rows, scale = near[begin:end].view(last - first, -1), scales[first:last].unsqueeze(1)
            code = unpack(codes[at : at + size], self.bits, end - begin).view_as(rows).double()
            shift = None if shifts is None else self._shift(shifts, rows)
            high = rows.double().div_(scale)
            if shift is not None:
                high += shift
            high.sub_(code).div_(colours).round_()
            same = _digest(high.nan_to_num(0.0).clamp(-FARTHEST, FARTHEST).int(), weights) == digests[first:last]
            wrong += last - first - int((same & high.isfinite().all(1) & scale.isfinite().view(-1)).sum())
            found = torch.add(code, high, alpha=colours)
            if shift is not None:
                found -= shift
            out[begin:end].view_as(rows).copy_(found.mul_(scale))
            if apart is not None:
                apart[first:last] = (out[begin:end].view_as(rows) - rows).abs().amax(1)
            at += size
        return wrong

    def _head(self, payload: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """The lattice distances and the check sums at the beginning of a payload."""
        return payload[: 4 * blocks].view(torch.float32), payload[4 * blocks : 8 * blocks].view(torch.int32)

    def _shifts(self, seed: int) -> torch.Generator | None:
        return torch.Generator().manual_seed(seed) if self.dithered else None

    def _shift(self, generator: torch.Generator, rows: Tensor) -> Tensor:
        """By how much of a step the lattice lies elsewhere for each number."""
        return torch.rand(rows.shape, generator=generator, dtype=torch.float64).to(rows.device)

    def _chunks(self, numel: int) -> Iterator[tuple[int, int, int, int]]:
        """First and last block of each chunk, and its numbers: whole blocks, then a short one if there is a rest."""
        step = max(CHUNK // self.block, 1)
        whole = numel // self.block
        for first in range(0, whole, step):
            last = min(first + step, whole)
            yield first, last, first * self.block, last * self.block
        if whole * self.block < numel:
            yield whole, whole + 1, whole * self.block, numel


def refuse_lattice(codec: object, name: str) -> None:
    """For who sends sums and changes, which the receiver knows nothing of."""
    if isinstance(codec, Lattice):
        raise SettingError(
            f"{name} sends to workers that have nothing near what is sent, from which {codec!r} could be decoded; use "
            "Half, BFloat16 or, with LocalSGD, Uniform8"
        )


def _weights(block: int, device: torch.device) -> Tensor:
    """Odd numbers at random, all different, none the opposite of another.

    Then a single difference, times its weight, is never 0 modulo 2^32, nor is the sum or difference of two weights.
    """
    generator = torch.Generator().manual_seed(SEED)
    room = (1 << 30) // block
    found = torch.arange(block) * room + torch.randint(room, (block,), generator=generator)
    return (2 * found[torch.randperm(block, generator=generator)] + 1).int().to(device)


def _digest(high: Tensor, weights: Tensor) -> Tensor:
    """Sum of numbers times weights modulo 2^32, of each row."""
    return (high * weights[: high.shape[1]]).sum(1).int()
