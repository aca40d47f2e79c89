"""A few bits for each number of a model, for a receiver that has nearly the same model (Davies et al. 2021).

Every number is rounded to the nearest point k s of a lattice, and only k modulo q = 2^bits travels. The receiver takes
the point of that colour that is nearest to its own number. So the error depends on how far the two models are apart,
not on how large they are. No scale of the numbers is lost, and nothing has to be remembered of any partner.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.codec import rounding
from paceline.codec.packing import packed_bytes
from paceline.compiled import has_numba
from paceline.errors import SettingError

if TYPE_CHECKING:
    from paceline.codec.fused import Kernels

__all__ = ["Lattice", "refuse_lattice"]

SEED = 9543  # of the weights in the digest: the same everywhere


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

    @property
    def kernel(self) -> str:
        """What computes it for numbers on the CPU: ``numba`` where that is installed, in one pass, else ``torch``.

        Both give the same bits. A dithered lattice, and one of numbers on another device, is computed by torch.
        """
        return "torch" if self.dithered or not has_numba() else "numba"

    def blocks(self, numel: int) -> int:
        """How many blocks so many numbers are; the last may be short."""
        return -(-numel // self.block)

    def bytes_for(self, numel: int) -> int:
        """The length of a payload."""
        return 8 * self.blocks(numel) + packed_bytes(numel, self.bits)

    def encode(self, values: Tensor, reach: Tensor, seed: int = 0, points: Tensor | None = None) -> Tensor:
        """Bytes from which anybody whose numbers are at most ``reach`` (one for each block) away can decode these.

        ``points`` gets what everybody sees then.
        """
        _refuse_other_numbers(values)
        payload = torch.empty(self.bytes_for(values.numel()), dtype=torch.uint8, device=values.device)
        (scales, digests), codes = self._split(payload, values.numel())
        weights = _weights(self.block).to(values.device)
        if (kernels := self._kernels(values)) is not None:
            flat = (values, reach, weights, scales, digests, codes, _nothing() if points is None else points)
            numbers, reached, heavy, *rest = (each.detach().numpy() for each in flat)
            kernels.encode(numbers, reached, self.block, heavy, *rest)
        else:
            head, shifts = (scales, digests), self._shifts(seed, values)
            rounding.encode(values, reach, self.bits, self.block, weights, head, codes, points, shifts)
        return payload

    def decode(self, payload: Tensor, near: Tensor, out: Tensor, apart: Tensor | None = None, seed: int = 0) -> int:
        """Write the lattice points to ``out``, seen from ``near``, the receiver's own numbers.

        Gives the number of blocks in which some were too far away, so that ``out`` is not what was sent. ``apart`` gets
        the largest distance of ``out`` from ``near`` in each block.
        """
        _refuse_other_numbers(near)
        numel = near.numel()
        if payload.numel() != self.bytes_for(numel):
            raise SettingError(
                f"a payload of {payload.numel()} bytes is not one of {numel} numbers, for which {self!r} makes "
                f"{self.bytes_for(numel)}; decode with the codec and the length that it was encoded with"
            )
        if payload.storage_offset() % 4:  # it begins where no float32 can
            payload = payload.clone()
        (scales, digests), codes = self._split(payload, numel)
        weights = _weights(self.block).to(near.device)
        apart = near.new_empty(len(scales)) if apart is None else apart
        if (kernels := self._kernels(near)) is not None:
            flat = (near, weights, scales, digests, codes, out, apart)
            own, heavy, *rest = (each.detach().numpy() for each in flat)
            return kernels.decode(own, self.block, heavy, *rest)
        shifts = self._shifts(seed, near)
        return rounding.decode(near, self.bits, self.block, weights, (scales, digests), codes, out, apart, shifts)

    def _split(self, payload: Tensor, numel: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The lattice distances and the check sums at the beginning of a payload, and the codes behind them."""
        end = 4 * self.blocks(numel)
        return (payload[:end].view(torch.float32), payload[end : 2 * end].view(torch.int32)), payload[2 * end :]

    def _shifts(self, seed: int, like: Tensor) -> Tensor | None:
        """By how much of a step the lattice lies elsewhere for each number."""
        if not self.dithered:
            return None
        return torch.rand(len(like), generator=torch.Generator().manual_seed(seed)).to(like.device)

    def _kernels(self, values: Tensor) -> Kernels | None:
        if self.kernel == "torch" or values.device.type != "cpu":
            return None
        from paceline.codec.fused import kernels  # takes a second, and not everybody has numba

        return kernels(self.bits)


@cache
def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.float32)


def _refuse_other_numbers(values: Tensor) -> None:
    if values.dtype != torch.float32 or values.dim() != 1 or not values.is_contiguous():
        raise SettingError(
            f"Lattice works on flat contiguous tensors of float32, not on {values.dtype} of shape "
            f"{tuple(values.shape)}; give it values.float().reshape(-1)"
        )


def refuse_lattice(codec: object, name: str) -> None:
    """For who sends sums and changes, which the receiver knows nothing of."""
    if isinstance(codec, Lattice):
        raise SettingError(
            f"{name} sends to workers that have nothing near what is sent, from which {codec!r} could be decoded; use "
            "Half, BFloat16 or, with LocalSGD, Uniform8; Lattice is for Gossip"
        )


@cache
def _weights(block: int) -> Tensor:
    """Odd numbers at random, all different, none the opposite of another.

    Then a single difference, times its weight, is never 0 modulo 2^32, nor is the sum or difference of two weights.
    """
    generator = torch.Generator().manual_seed(SEED)
    room = (1 << 30) // block
    found = torch.arange(block) * room + torch.randint(room, (block,), generator=generator)
    return (2 * found[torch.randperm(block, generator=generator)] + 1).int()
