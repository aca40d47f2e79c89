"""A sum over the workers whose numbers travel encoded."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.errors import SettingError
from paceline.roles import Codec

__all__ = ["Channel", "CodedSum"]

WHOLE = 256  # a slice is a multiple of this: payloads begin at even addresses, and the usual blocks are whole


class Channel(Protocol):
    """The workers that sum, and what they can do together."""

    rank: int
    size: int
    device: torch.device

    def all_to_all(self, received: Tensor, sent: Tensor, what: str) -> None:
        """Part r of ``sent`` goes to rank r; part r of ``received`` is what rank r has sent here."""

    def all_gather(self, received: Tensor, sent: Tensor, what: str) -> None:
        """``received`` becomes what all have sent, by rank."""


class CodedSum:
    """Sums a flat tensor over the workers, encoded both on the way to who adds and on the way back.

    The numbers are cut into one slice for each worker. Everybody encodes its values slice by slice and sends slice i to
    worker i, which decodes what it gets, adds it up in the order of ranks, in float32, encodes the sum and sends it to
    all. All decode the same payloads, each worker also its own, so that all end with the same bits. A worker's values
    for its own slice do not travel, but they are encoded and decoded as those of the others are.

    If the codec asks for feedback, each worker keeps what its encoding has lost, of all its values and of the sum that
    it made, and adds it the next time: over time, everything arrives. Where that is not finite, because the values were
    not, it is forgotten; it would spoil every later sum.
    """

    def __init__(self, channel: Channel, codec: Codec) -> None:
        self._channel, self._codec = channel, codec
        self.bytes_sent = 0
        """What this worker handed to the network in the last run."""
        self.reset()

    def reset(self) -> None:
        """Forget what was lost so far."""
        self._numel = 0
        self._values = self._sum = self._scratch = torch.empty(0)
        self._sent = self._received = torch.empty(0)

    @torch.no_grad()
    def run(self, values: Tensor, what: str) -> None:
        """Sum ``values`` over the workers, in place. They are exchanged, added up and given back as float32.

        With one worker nothing travels, and nothing is encoded. When the number of values changes, :meth:`reset`.
        """
        self.bytes_sent = 0
        size = self._channel.size
        if size == 1 or values.numel() == 0:
            return
        if values.numel() != self._numel:
            self._lay_out(values.numel())
        # A state may have been loaded to another device.
        self._values, self._sum, self._scratch = (
            each.to(values.device) for each in (self._values, self._sum, self._scratch)
        )
        mine = self._values[: self._numel]
        if self._codec.feedback:
            mine.add_(values)
        else:
            mine.copy_(values)
        self._encode(self._values.view(size, -1))
        self._channel.all_to_all(self._received.view(-1), self._sent.view(-1), what)
        self._add()
        self._encode(self._sum.view(1, -1))
        self._channel.all_gather(self._received.view(-1), self._sent[0], what)
        self._give(values)
        self.bytes_sent = 2 * (size - 1) * self._codec.bytes_for(self._sum.numel())

    def state_dict(self) -> dict[str, Any]:
        """What was lost so far on this worker: of its values, and of the sum that it made; empty if nothing is kept."""
        if not self._numel or not self._codec.feedback:
            return {}
        return {
            "size": self._channel.size,
            "values": self._values[: self._numel].clone(),
            "sum": self._sum.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back. A codec without feedback has no use for it."""
        self.reset()
        if not state or not self._codec.feedback:
            return
        if state["size"] != self._channel.size:
            raise SettingError(
                f"what a sum over {state['size']} workers has kept is of no use to {self._channel.size}: their slices "
                "are others; call reset() instead"
            )
        self._lay_out(state["values"].numel())
        self._values[: self._numel].copy_(state["values"])
        self._sum.copy_(state["sum"])

    def _lay_out(self, numel: int) -> None:
        size, device = self._channel.size, self._channel.device
        part = -(-numel // (size * WHOLE)) * WHOLE
        self._numel = numel
        # What was lost before, then what is sent, then what is lost: the same buffers for all three.
        self._values = torch.zeros(size * part, dtype=torch.float32, device=device)
        self._sum = torch.zeros(part, dtype=torch.float32, device=device)
        self._scratch = torch.empty(part, dtype=torch.float32, device=device)
        payload = self._codec.encode(self._sum)
        self._sent = payload.new_empty(size, payload.numel())
        self._received = torch.empty_like(self._sent)

    def _encode(self, rows: Tensor) -> None:
        """Lay the payloads of these rows out to be sent; with feedback, the rows become what they have lost."""
        for row, sent in zip(rows, self._sent, strict=False):
            payload = self._codec.encode(row)
            sent.copy_(payload)
            if self._codec.feedback:
                self._codec.decode(payload, self._scratch)
                _drop_non_finite(row.sub_(self._scratch))

    def _add(self) -> None:
        """The sum of what was received, and with feedback of what was lost before."""
        if not self._codec.feedback:
            self._sum.zero_()
        for payload in self._received:
            self._codec.decode(payload.to(self._sum.device), self._scratch)
            self._sum.add_(self._scratch)

    def _give(self, values: Tensor) -> None:
        """Decode the sums of all slices to where they belong; the last ones may be short, or beyond the end."""
        for payload, out in zip(self._received, torch.split(values, self._sum.numel()), strict=False):
            self._codec.decode(payload.to(values.device), self._scratch)
            out.copy_(self._scratch[: out.numel()])


def _drop_non_finite(lost: Tensor) -> None:
    low, high = torch.aminmax(lost)
    if not (low.isfinite() and high.isfinite()):
        torch.nan_to_num_(lost, nan=0.0, posinf=0.0, neginf=0.0)
