"""Floating point of 16 bits: half the bytes, and an error in proportion to each number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import SettingError
from paceline.roles import Codec

__all__ = ["BFloat16", "Half", "check_length", "check_range"]

LIMIT = 65520.0  # from here on float16 rounds to infinity; below, at most to its largest number, 65504


@dataclass(frozen=True)
class Half:
    """IEEE float16: 11 bits of precision from 6.1e-5 to 65504; what is below 3e-8 becomes zero.

    Larger numbers are a :class:`~paceline.errors.SettingError`. NaN and infinity stay what they are.
    """

    feedback = False

    def bytes_for(self, numel: int) -> int:
        """Two for each number."""
        return 2 * numel

    def encode(self, values: Tensor) -> Tensor:
        """Each number rounded to the nearest float16."""
        check_range(values)
        return _encode(values, torch.float16)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Each float16 as it is, in the dtype of ``out``."""
        check_length(self, payload, out)
        _decode(payload, out, torch.float16)


@dataclass(frozen=True)
class BFloat16:
    """The upper half of a float32: its range, with 8 bits of precision.

    Nothing overflows that float32 can hold, but for the last 0.2 % below its largest number, 3.4e38, which become
    infinite.
    """

    feedback = False

    def bytes_for(self, numel: int) -> int:
        """Two for each number."""
        return 2 * numel

    def encode(self, values: Tensor) -> Tensor:
        """Each number rounded to the nearest bfloat16."""
        return _encode(values, torch.bfloat16)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Each bfloat16 as it is, in the dtype of ``out``."""
        check_length(self, payload, out)
        _decode(payload, out, torch.bfloat16)


def check_range(values: Tensor) -> None:
    """Refuse finite numbers that float16 would make infinite."""
    if values.numel() == 0:
        return
    low, high = torch.aminmax(values)
    if low > -LIMIT and high < LIMIT:
        return
    beyond = values[values.isfinite() & (values.abs() >= LIMIT)]  # without NaN and infinity, which may pass
    if beyond.numel():
        raise SettingError(
            f"Half cannot carry {beyond[0].item():g}: the numbers of float16 end at 65504 ({beyond.numel()} of "
            f"{values.numel()} are beyond); use BFloat16, which has the range of float32, or scale the loss down"
        )


def check_length(codec: Codec, payload: Tensor, out: Tensor) -> None:
    """Refuse a payload that cannot be one of as many numbers: it would decode to noise."""
    if payload.numel() != codec.bytes_for(out.numel()):
        raise SettingError(
            f"a payload of {payload.numel()} bytes is not one of {out.numel()} numbers, for which {codec!r} makes "
            f"{codec.bytes_for(out.numel())}; decode with the codec and the length that it was encoded with"
        )


def _encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    coded = torch.empty(values.numel(), dtype=dtype, device=values.device)
    return coded.copy_(values.reshape(-1)).view(torch.uint8)


def _decode(payload: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    if payload.storage_offset() % 2:  # a view needs whole numbers of the storage
        payload = payload.clone()
    out.copy_(payload.view(dtype).view(out.shape))
