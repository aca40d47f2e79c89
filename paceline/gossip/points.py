"""What two partners show each other of their models: points that both see alike, in as few bits as they are near."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codec import Identity, Lattice

__all__ = ["Points"]

WHOLE = 32  # bits: full precision, which everybody can decode
WIDE = 16
MARGIN = 2.0  # what is sent reaches so many times as far as partners were apart lately
FORGET = 0.95  # of the distance after every exchange, so that a fine lattice comes back after a wide one


class Points:
    """Encodes flat models for partners, and decodes theirs as seen from the own one.

    ``levels`` are the bits that can be asked for, one after the other, when a partner is too far away for the first.
    The distance to partners is followed block by block: a lattice is as fine as they are near.
    """

    def __init__(self, codec: Lattice | Identity, numel: int) -> None:
        self.numel = numel
        """How many numbers a model has."""
        self._lattices: dict[int, Lattice] = {}
        if isinstance(codec, Lattice):
            wide = Lattice(WIDE, codec.block, codec.dithered)
            self._lattices = {codec.bits: codec, WIDE: wide}
            self._reach = torch.zeros(codec.blocks(numel))
        self.levels = (*self._lattices, WHOLE)
        """Bits, the fewest first; the last is full precision."""

    def prepare(self) -> None:
        """Numba compiles for seconds when it is first used: better before the training than in its middle."""
        for lattice in self._lattices.values():
            little = torch.zeros(lattice.block)
            payload = lattice.encode(little, torch.zeros(1))
            lattice.decode(payload, little, torch.empty_like(little), torch.zeros(1))

    def level_above(self, bits: int) -> int | None:
        """The next level; None above full precision."""
        return next((level for level in self.levels if level > bits), None)

    def fits(self, bits: int, payload: Tensor) -> bool:
        """Whether it can be a point of so many bits: of a partner with the same codec and model."""
        return bits in self.levels and payload.numel() == self.bytes_for(bits)

    def bytes_for(self, bits: int) -> int:
        """The length of a payload."""
        return self._lattices[bits].bytes_for(self.numel) if bits in self._lattices else 4 * self.numel

    def encode(self, model: Tensor, bits: int, seed: int) -> tuple[Tensor, Tensor]:
        """What travels, and the point that whoever decodes it sees."""
        if bits == WHOLE:
            return model.view(torch.uint8), model
        seen = torch.empty_like(model)
        return self._lattices[bits].encode(model, self._reach, seed, points=seen), seen

    def decode(self, payload: Tensor, bits: int, near: Tensor, seed: int) -> Tensor | None:
        """The partner's point; None if it is too far from ``near`` for so few bits, or not finite in full precision."""
        if bits == WHOLE:
            point = payload.clone().view(torch.float32)
            if not point.isfinite().all():
                return None
            if self._lattices:
                block = self._lattices[self.levels[0]].block
                apart = torch.nn.functional.pad((point - near).abs(), (0, -self.numel % block))
                self._learn(apart.view(-1, block).amax(1))
            return point
        lattice = self._lattices[bits]
        point, apart = torch.empty_like(near), torch.empty_like(self._reach)
        if lattice.decode(payload, near, point, apart, seed):
            return None
        self._learn(apart)
        return point

    def _learn(self, apart: Tensor) -> None:
        seen = torch.where(apart.isfinite(), apart, 0.0)  # the own model may have diverged
        torch.maximum(self._reach * FORGET, seen * MARGIN, out=self._reach)
