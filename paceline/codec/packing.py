"""Codes of a few bits each, packed into bytes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GROUP", "pack", "packed_bytes", "unpack"]

GROUP = 8  # codes of b bits are b bytes, the first code in the lowest bits
WHOLE = {8: torch.uint8, 16: torch.int16}  # codes that are whole numbers of their own


def packed_bytes(numel: int, bits: int) -> int:
    """How many bytes so many codes take; those of the last group are filled up."""
    return numel * bits // 8 if bits in WHOLE else -(-numel // GROUP) * bits


def pack(indices: Tensor, bits: int, out: Tensor) -> None:
    """Write the lowest bits of int32 numbers to bytes."""
    if bits in WHOLE:
        out.view(WHOLE[bits]).copy_(indices)  # which drops what is above them
        return
    rows = torch.nn.functional.pad(indices & ((1 << bits) - 1), (0, -indices.numel() % GROUP)).view(-1, GROUP)
    for at, byte in enumerate(_bytes(bits)):
        columns = [rows[:, code] << -shift if shift < 0 else rows[:, code] >> shift for code, shift in byte]
        out[at::bits].copy_(sum(columns[1:], columns[0]) & 0xFF)


def unpack(payload: Tensor, bits: int, numel: int) -> Tensor:
    """The int32 codes again; of 16 bits they may be negative, and have to be taken modulo 2^16."""
    if bits in WHOLE:
        return payload.view(WHOLE[bits]).int()
    groups = payload.view(-1, bits).int()
    rows = torch.zeros(len(groups), GROUP, dtype=torch.int32, device=payload.device)
    for at, byte in enumerate(_bytes(bits)):
        for code, shift in byte:
            part = groups[:, at] >> -shift if shift < 0 else groups[:, at] << shift
            rows[:, code] += part & ((1 << bits) - 1)
    return rows.view(-1)[:numel]


def _bytes(bits: int) -> list[list[tuple[int, int]]]:
    """For each byte of a group: the codes that have bits in it, and how far these are shifted down to get there."""
    return [
        [
            (code, 8 * byte - bits * code)
            for code in range(GROUP)
            if bits * code < 8 * byte + 8 and 8 * byte < bits * (code + 1)
        ]
        for byte in range(bits)
    ]
