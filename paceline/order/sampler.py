"""An order that learns from gradients, for loops and loaders of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from paceline.errors import LoopError, SettingError
from paceline.order.balancing import Balancer, PairBalancer
from paceline.probe.sketch import SignSketch

__all__ = ["BalancedSampler"]


class BalancedSampler(Sampler[int]):
    """Gives the examples of every epoch in an order that the gradients of the epoch before have made.

    Give it to a ``DataLoader`` (with ``num_workers`` of any number), and its :meth:`observe` the gradients of every
    batch, in the order of the examples in it.

    Args:
        length: how many examples there are.
        balancer: makes what learns the order from the first one: :class:`PairBalancer` (PairGraB) or
            :class:`MeanBalancer` (GraB), or a function that gives one with settings.
        sketch: numbers that are kept of each gradient, in a random linear image; None for all of them.
        seed: of the first order, and of the image.
    """

    def __init__(
        self,
        length: int,
        *,
        balancer: Callable[[list[list[int]]], Balancer] = PairBalancer,
        sketch: int | None = None,
        seed: int = 0,
    ) -> None:
        if length < 1:
            raise SettingError(f"BalancedSampler: length ({length}) must be at least 1")
        self._order: list[int] = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
        self._balancer = balancer([self._order])
        self._sketch, self._seed = sketch, seed
        self._map: SignSketch | None = None
        self._observed = 0
        self._given = False

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        """The order of the next epoch; the one before must have been observed to its end."""
        if self._given:
            self._order = self._balancer.next_orders()[0]
            self._observed = 0
        self._given = True
        return iter(list(self._order))

    def observe(self, gradients: Tensor | Sequence[Tensor] | Mapping[str, Tensor]) -> None:
        """Take the gradients of a batch's examples: (B, d), or one tensor (B, …) for each parameter.

        The latter is what ``torch.func.vmap(torch.func.grad(loss))`` gives.
        """
        if not self._given:
            raise LoopError("gradients were observed before the sampler has given an example; iterate over it first")
        rows = self._rows(gradients)
        self._balancer.observe(rows)
        self._observed += len(rows)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint between two epochs."""
        if self._given and self._observed < len(self._order):
            raise LoopError(
                f"the epoch is not over ({self._observed} of {len(self._order)} gradients were observed), and a loader "
                "cannot go on in the middle of one; save between epochs"
            )
        return {"order": self._order, "given": self._given, "balancer": self._balancer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        if len(state["order"]) != len(self._order):
            raise SettingError(
                f"the state is of {len(state['order'])} examples, this sampler of {len(self._order)}; use the same data"
            )
        self._order, self._given = list(state["order"]), state["given"]
        self._observed = len(self._order) if self._given else 0
        self._balancer.load_state_dict(state["balancer"])

    def _rows(self, gradients: Tensor | Sequence[Tensor] | Mapping[str, Tensor]) -> Tensor:
        if isinstance(gradients, Tensor):
            rows = gradients.detach()
        else:
            given = list(gradients.values() if isinstance(gradients, Mapping) else gradients)
            if not given:
                raise LoopError("no gradients were given")
            rows = torch.cat([each.detach().flatten(1) for each in given], 1)
        if self._sketch is None or rows.dim() != 2:
            return rows
        if self._map is None:
            self._map = SignSketch(rows.shape[1], self._sketch, self._seed, dtype=rows.dtype, device=rows.device)
        image = self._map
        return torch.stack([image.of([row], [0]) for row in rows]) if len(rows) else rows.new_empty(0, self._sketch)
