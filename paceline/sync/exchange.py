"""Gradients in a flat buffer: one collective for all of them, and which of them there are."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from torch import Tensor, nn

from paceline.errors import SettingError
from paceline.fleet import Fleet
from paceline.replica import Replica
from paceline.roles import Codec
from paceline.sync.flat import FlatSum, Rider, arrangement
from paceline.sync.notes import Numbers

__all__ = ["Exchange", "Presence"]


class Presence:
    """Which parameters have a gradient on any worker: one that is None everywhere stays None."""

    def __init__(self) -> None:
        self.here: list[bool] = []
        """Which have one on this worker: set it before the exchange."""
        self.anywhere: list[bool] = []

    @property
    def numel(self) -> int:
        """One number for each parameter."""
        return len(self.here)

    def write(self, out: Numbers) -> None:
        """1 where there is a gradient."""
        out[:] = self.here

    def read(self, summed: Numbers) -> None:
        """Present anywhere."""
        self.anywhere = [workers > 0 for workers in summed.tolist()]


class Exchange:
    """Sums the gradients of a plain module over the workers, one collective for each dtype."""

    def __init__(self, fleet: Fleet, replica: Replica, codec: Codec, riders: Sequence[Rider]) -> None:
        self._fleet, self._replica = fleet, replica
        self._sum = FlatSum(fleet, codec)
        self._layout: object = None
        self._parameters: list[nn.Parameter] = []
        self._presence = Presence()
        self._riders = [self._presence, *riders]

    @property
    def bytes_sent(self) -> int:
        """What this worker handed to the network layer in the last exchange."""
        return self._sum.bytes_sent

    @property
    def gradients(self) -> list[Tensor]:
        """All gradients, one flat tensor for each dtype; zeros where there is none."""
        return self._sum.bodies

    def pack(self, scale: float) -> None:
        """Lay ``scale`` times the gradients into the flat buffers; a missing one counts as zero."""
        self._parameters = parameters = self._replica.parameters
        gradients = [p.grad for p in parameters]
        self._presence.here = [gradient is not None for gradient in gradients]
        layout = (list(map(id, parameters)), sum([rider.numel for rider in self._riders]))
        if layout != self._layout:
            forms = [(name, arrangement(p)) for name, p in self._replica.named]
            self._fleet.agree(
                {"set of trained parameters": f"{len(forms)} of digest {zlib.crc32(repr(forms).encode())}"}
            )
            self._sum.lay_out(parameters, layout[1])
            self._layout = layout
        try:
            self._sum.pack(gradients, scale)
        except RuntimeError:
            _refuse_sparse(gradients)
            raise

    def close(self) -> None:
        """No more exchanges."""
        self._sum.close()
        self._layout = None

    def run(self, what: str) -> None:
        """Leave the sum over the workers of what was packed in every ``.grad``."""
        self._sum.run(self._riders, what)
        in_place = self._replica.ddp is not None
        for p, view, there in zip(self._parameters, self._sum.views, self._presence.anywhere, strict=True):
            if not there:
                continue
            if in_place and p.grad is not None:
                p.grad.copy_(view)
            else:
                p.grad = view


def _refuse_sparse(gradients: Sequence[Tensor | None]) -> None:
    for gradient in gradients:
        if gradient is not None and gradient.is_sparse:
            raise SettingError(
                f"a parameter of shape {tuple(gradient.shape)} has a sparse gradient, which cannot be averaged in a "
                "flat buffer; build its layer with sparse=False"
            )
