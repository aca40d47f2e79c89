"""Eight bits for each number: evenly spaced levels, with a scale for each block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.codec.half import check_length
from paceline.errors import SettingError

__all__ = ["Uniform8", "scales_of"]

LEVELS = 127  # on each side of zero
CHUNK = 262144  # numbers at a time on a CPU: what is computed on the way stays in its cache
SMALLEST = 8  # numbers of a block; with 4, scales and codes would take as much as float16
NORMAL = torch.finfo(torch.float32).tiny


def scales_of(largest: Tensor) -> Tensor:
    """The distance of two levels, s = max|x| / 127, of each block, from its max|x|.

    Zero where s would not be a normal float32 (max|x| below 1.5e-36) and thus too coarse; NaN or infinite where a
    number of the block is.
    """
    scales = largest / LEVELS
    return scales.masked_fill_(scales < NORMAL, 0.0)


@dataclass(frozen=True)
class Uniform8:
    """One byte for each number x, round(x / s), and a float32 for each block of numbers: s = max|x| / 127.

    A decoded number is off by at most s / 2, whatever its own size, so that small numbers beside large ones are lost;
    error feedback brings them back later. A block with a NaN or an infinity has no finite number when it is decoded.
    """

    block: int = 256

    feedback = True

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < SMALLEST:
            raise SettingError(
                f"block ({self.block!r}) must be a whole number of at least {SMALLEST}, because each block takes 4 "
                "bytes more for its scale; 256 is a good one"
            )

    def bytes_for(self, numel: int) -> int:
        """One for each number and four for each block; the last one may be short."""
        return self._scale_bytes(numel) + numel

    def encode(self, values: Tensor) -> Tensor:
        """The scales of all blocks, then the codes of all numbers."""
        values, numel = values.reshape(-1), values.numel()
        payload = torch.empty(self.bytes_for(numel), dtype=torch.uint8, device=values.device)
        scales = payload[: self._scale_bytes(numel)].view(torch.float32)
        codes = payload[self._scale_bytes(numel) :].view(torch.int8)
        scratch = torch.empty(min(self._chunk(values), numel), dtype=torch.float32, device=values.device)
        for begin, end, first, last in self._chunks(values):
            rows = values[begin:end].float().view(last - first, -1)
            work = scratch[: end - begin].view_as(rows)
            torch.abs(rows, out=work)
            torch.amax(work, 1, out=scales[first:last])
            scale = scales[first:last].copy_(scales_of(scales[first:last]))
            # What a division by zero would give has no integer that all processors agree on.
            torch.div(rows, scale.masked_fill(scale == 0, 1.0).unsqueeze(1), out=work)
            # What is not finite gets any code: times a scale that is not finite, it will not be, either.
            codes[begin:end].copy_(work.round_().view(-1))
        return payload

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Codes times scales, computed in float32."""
        check_length(self, payload, out)
        out = out.view(-1)
        head = self._scale_bytes(out.numel())
        scales = payload[:head].clone().view(torch.float32)  # a payload may begin where a float32 cannot
        codes = payload[head:].view(torch.int8)
        scratch = torch.empty(min(self._chunk(out), out.numel()), dtype=torch.float32, device=out.device)
        in_place = out.dtype == torch.float32
        for begin, end, first, last in self._chunks(out):
            work = out[begin:end] if in_place else scratch[: end - begin]
            work.copy_(codes[begin:end]).view(last - first, -1).mul_(scales[first:last].unsqueeze(1))
            if not in_place:
                out[begin:end].copy_(work)

    def _scale_bytes(self, numel: int) -> int:
        return 4 * (-(-numel // self.block))

    def _chunk(self, values: Tensor) -> int:
        if values.device.type != "cpu":  # a GPU prefers few large kernels
            return max(1, values.numel())
        return max(self.block, CHUNK // self.block * self.block)

    def _chunks(self, values: Tensor) -> Iterator[tuple[int, int, int, int]]:
        """Begin and end of each chunk, in numbers and in blocks: whole blocks, then a short one if there is a rest."""
        numel, block, chunk = values.numel(), self.block, self._chunk(values)
        whole = numel // block * block
        for begin in range(0, whole, chunk):
            end = min(begin + chunk, whole)
            yield begin, end, begin // block, end // block
        if whole < numel:
            yield whole, numel, whole // block, whole // block + 1
