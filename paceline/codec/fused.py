"""Lattice points in one pass over the numbers, compiled by numba: the same bits as :mod:`paceline.codec.rounding`.

Only imported where numba is installed. All arithmetic is in 32 bits, so that eight numbers are computed at a time. The
compiler may not reorder sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy import float32, int32, uint64
from numpy.typing import NDArray

from paceline.codec.packing import GROUP
from paceline.codec.rounding import FINEST, LARGEST, MAGIC, SLACK, SMALLEST
from paceline.compiled import compiled

__all__ = ["Kernels", "kernels"]

Array = NDArray[Any]

SIZE = int32(0x7FFFFFFF)  # the bits of a float32 without its sign: as whole numbers they have the order of the sizes
INFINITE = int32(0x7F800000)


class Kernels(NamedTuple):
    """For one number of bits."""

    encode: Callable[[Array, Array, int, Array, Array, Array, Array, Array], None]
    decode: Callable[[Array, int, Array, Array, Array, Array, Array, Array], int]


@cache
def kernels(bits: int) -> Kernels:
    """Compile those for so many bits, which takes some seconds the first time on a machine."""
    shift, mask = int32(bits), int32((1 << bits) - 1)
    colours, finest = float32((1 << bits) - SLACK), float32(FINEST)
    narrowest, widest = float32(SMALLEST), float32(LARGEST)
    byte, whole, nibble = bits == 8, bits == 16, bits == 4
    middle, lowest_of = float32(MAGIC), float32(MAGIC - (1 << (bits - 1)))
    group, last_byte = uint64(GROUP), uint64(0xFF)

    @compiled
    def scale_for(reach: Any, largest: Any) -> Any:
        needed = float32(2.0) * reach / colours
        counted = int32(largest).view(np.float32) * finest
        needed = needed if needed > counted else counted
        needed = needed if needed > narrowest else narrowest
        if largest >= INFINITE or not needed <= widest or not reach < float32(np.inf):
            return float32(np.nan)
        return int32(int32(float32(needed).view(np.int32) + int32(0x7FFFFF)) & INFINITE).view(np.float32)

    @compiled
    def put(values: Array, zero: Any, weights: Array, codes: Array) -> Any:
        digest, largest = int32(0), int32(0)
        for at in range(values.size):
            value = values[at]
            index = float32(value + zero).view(np.int32)
            digest = int32(digest + int32(int32(index >> shift) * weights[at]))
            codes[at] = index & mask
            size = int32(float32(value).view(np.int32) & SIZE)
            largest = size if size > largest else largest
        return digest, largest

    @compiled
    def show(values: Array, zero: Any, points: Array) -> None:
        for at in range(values.size):
            points[at] = float32(float32(values[at] + zero) - zero)

    @compiled
    def take(near: Array, zero: Any, least: Any, weights: Array, codes: Array, out: Array) -> Any:
        digest, apart = int32(0), int32(0)
        for at in range(near.size):
            value = near[at]
            lowest = float32(value + least).view(np.int32)
            index = int32(lowest + int32(int32(int32(codes[at]) - lowest) & mask))
            digest = int32(digest + int32(int32(index >> shift) * weights[at]))
            point = float32(index.view(np.float32) - zero)
            out[at] = point
            size = int32(float32(point - value).view(np.int32) & SIZE)
            apart = size if size > apart else apart
        return digest, apart

    @compiled
    def pack(codes: Array, out: Array) -> None:
        if whole:
            for at in range(codes.size):
                out[2 * at] = codes[at] & 0xFF
                out[2 * at + 1] = codes[at] >> 8
            return
        if nibble and codes.size % GROUP == 0:
            for at in range(out.size):
                out[at] = codes[2 * at] | (codes[2 * at + 1] << 4)
            return
        for first in range(out.size // bits):
            held, filled, byte_at = uint64(0), uint64(0), first * bits
            for code in range(group):
                at = first * GROUP + code
                held |= uint64(codes[at] if at < codes.size else 0) << filled
                filled += uint64(bits)
                while filled >= uint64(8):
                    out[byte_at] = held & last_byte
                    held >>= uint64(8)
                    filled -= uint64(8)
                    byte_at += 1

    @compiled
    def unpack(packed: Array, codes: Array) -> None:
        if whole:
            for at in range(codes.size):
                codes[at] = packed[2 * at] | (packed[2 * at + 1] << 8)
            return
        if nibble and codes.size % GROUP == 0:
            for at in range(packed.size):
                codes[2 * at] = packed[at] & 0xF
                codes[2 * at + 1] = packed[at] >> 4
            return
        for first in range(packed.size // bits):
            held, filled, byte_at = uint64(0), uint64(0), first * bits
            for code in range(group):
                while filled < uint64(bits):
                    held |= uint64(packed[byte_at]) << filled
                    filled += uint64(8)
                    byte_at += 1
                at = first * GROUP + code
                if at < codes.size:
                    codes[at] = held & uint64(mask)
                held >>= uint64(bits)
                filled -= uint64(bits)

    @compiled
    def encode(
        values: Array,
        reach: Array,
        block: int,
        weights: Array,
        scales: Array,
        digests: Array,
        codes: Array,
        points: Array,
    ) -> None:
        room = np.empty(0 if byte else block, np.uint16)
        full = block * bits // 8
        for number in range(scales.size):
            begin, end = number * block, min(values.size, (number + 1) * block)
            part = values[begin:end]
            packed = codes[number * full : min(codes.size, (number + 1) * full)]
            scale = scale_for(reach[number], int32(0))
            # Whether the largest number needs a wider lattice is seen on the way; it seldom does.
            for _ in range(2):
                zero = middle * scale
                if byte:
                    digest, largest = put(part, zero, weights, packed)
                else:
                    digest, largest = put(part, zero, weights, room)
                right = scale_for(reach[number], largest)
                if right == scale:
                    break
                scale = right
            if not byte:
                pack(room[: part.size], packed)
            scales[number], digests[number] = scale, digest
            if points.size:
                show(part, middle * scale, points[begin:end])

    @compiled
    def decode(
        near: Array, block: int, weights: Array, scales: Array, digests: Array, codes: Array, out: Array, apart: Array
    ) -> int:
        room = np.empty(0 if byte else block, np.uint16)
        full = block * bits // 8
        wrong = 0
        for number in range(scales.size):
            begin, end = number * block, min(near.size, (number + 1) * block)
            packed = codes[number * full : min(codes.size, (number + 1) * full)]
            scale, part = scales[number], near[begin:end]
            zero, least = middle * scale, lowest_of * scale
            if byte:
                digest, far = take(part, zero, least, weights, packed, out[begin:end])
            else:
                unpack(packed, room[: part.size])
                digest, far = take(part, zero, least, weights, room, out[begin:end])
            apart[number] = int32(far).view(np.float32)
            if digest != digests[number] or far >= INFINITE:
                wrong += 1
        return wrong

    return Kernels(encode, decode)
