"""Codes of a few bits each, packed into bytes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack", "packed_bytes", "unpack"]

GROUP = 8  # codes of b bits are b bytes


def packed_bytes(numel: int, bits: int) -> int:
    """How many bytes so many codes take; those of the last group are filled up."""
    if bits > 8:
        return numel + packed_bytes(numel, bits - 8)
    return numel if bits == 8 else -(-numel // GROUP) * bits


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Write int32 codes of at most 16 bits to bytes: the low eight bits of all, then what is above, closely packed."""
    if bits > 8:
        numel = codes.numel()
        out[:numel].copy_(codes & 0xFF)
        pack(codes >> 8, bits - 8, out[numel:])
    elif bits == 8:
        out.copy_(codes)
    else:
        rows = _in_groups(codes)
        for at, byte in enumerate(_bytes(bits)):
            columns = [rows[:, code] << -shift if shift < 0 else rows[:, code] >> shift for code, shift in byte]
            out[at::bits].copy_(sum(columns[1:], columns[0]) & 0xFF)


def unpack(payload: Tensor, bits: int, numel: int) -> Tensor:
    """The int32 codes again."""
    if bits > 8:
        return payload[:numel].int() + (unpack(payload[numel:], bits - 8, numel) << 8)
    if bits == 8:
        return payload.int()
    groups = payload.view(-1, bits).int()
    rows = torch.zeros(len(groups), GROUP, dtype=torch.int32, device=payload.device)
    for at, byte in enumerate(_bytes(bits)):
        for code, shift in byte:
            part = groups[:, at] >> -shift if shift < 0 else groups[:, at] << shift
            rows[:, code] += part & ((1 << bits) - 1)
    return rows.view(-1)[:numel]


def _in_groups(codes: Tensor) -> Tensor:
    missing = -codes.numel() % GROUP
    return torch.nn.functional.pad(codes, (0, missing)).view(-1, GROUP)


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
