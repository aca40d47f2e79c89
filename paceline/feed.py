"""The feed: order × plan → this worker's micro-batches.

What to fetch is always asked for by position, so a changed plan cannot give a wrong size, lose an example or
repeat one. Loader processes work ahead on a guess (the plans that would follow if nothing changed); what they
fetched is used if it is what the plan asks for, and thrown away if not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from paceline.errors import LoopError, SettingError
from paceline.loader import Collate, Fetch, Inline, Loader, Piece, Source, Tensors, tensors_of
from paceline.records import Plan
from paceline.roles import Order

__all__ = ["Feed", "Loading", "check_dataset", "to_device"]


def check_dataset(dataset: Dataset[Any]) -> int:
    """The length of a data set, or an error that says why it cannot be used."""
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise SettingError(
            "a DataLoader decides which examples come next, which is for the run to do: give loader.dataset, and "
            "batch=, num_workers= and collate_fn= to Run"
        )
    if isinstance(dataset, IterableDataset):
        raise SettingError(
            f"{name} is an iterable data set; Paceline decides which example comes next, so it needs a map-style one, "
            "with __len__ and __getitem__"
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise SettingError(f"{name} has no __len__ or no __getitem__; Paceline needs a map-style data set")
    length = len(dataset)
    if _is_columns(dataset):
        raise SettingError(
            f"a {name} of {length} tensors is a data set of {length} examples of different shapes; if their rows are "
            "the examples, give torch.utils.data.TensorDataset(x, y)"
        )
    if length == 0:
        raise SettingError(f"the data set ({name}) is empty; give one with at least one example")
    return length


def _is_columns(dataset: object) -> bool:
    """Whether it is a few tensors with the same number of rows, such as ``(x, y)``, and no list of examples."""
    if not isinstance(dataset, tuple | list) or len(dataset) < 2 or not all(isinstance(t, Tensor) for t in dataset):
        return False
    shapes = {tuple(tensor.shape) for tensor in dataset}
    rows = {shape[:1] for shape in shapes}
    return len(shapes) > 1 and len(rows) == 1 and rows != {()} and rows.pop()[0] > len(dataset)


@dataclass(frozen=True)
class Loading:
    """How examples are loaded, in the words of torch's ``DataLoader``."""

    collate_fn: Collate | None = None
    num_workers: int = 0
    prefetch: int | None = None
    pin_memory: bool = False
    deadline: float = 300.0

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise SettingError(f"num_workers ({self.num_workers}) must be 0 or more")
        if self.prefetch is not None and (self.prefetch < 1 or not self.num_workers):
            raise SettingError(
                f"prefetch ({self.prefetch}) must be at least 1, and needs loader processes: give num_workers, too"
            )


class Feed:
    """Gives a worker the examples that a plan assigns to it."""

    def __init__(
        self, dataset: Dataset[Any], order: Order, rank: int, seed: int, device: torch.device, loading: Loading
    ) -> None:
        self._dataset, self.length = dataset, check_dataset(dataset)
        self._order, self._rank, self._seed = order, rank, seed
        self._device, self._pin = device, loading.pin_memory
        if loading.pin_memory and device.type == "cpu":
            warnings.warn(
                "pin_memory has no effect: it speeds up copies to a GPU; the model is on the CPU", stacklevel=3
            )
        self._permutations: dict[int, Tensor] = {}
        self._source: Source
        tensors = tensors_of(dataset) if loading.collate_fn is None and not loading.num_workers else None
        fetch = Fetch(dataset, loading.collate_fn or default_collate, seed)
        if tensors is not None:
            self._source = Tensors(*tensors)
        elif loading.num_workers:
            self._source = Loader(
                fetch, self._ids, loading.num_workers, loading.prefetch or 2, loading.pin_memory, loading.deadline
            )
        else:
            self._source = Inline(fetch)

    def micro_batches(self, plan: Plan, future: Callable[[], Iterable[Plan]]) -> Iterator[tuple[int, Any]]:
        """The micro-batches of this worker, each with its number of examples.

        ``future`` gives the plans that would follow if nothing changed; it is called only to work ahead.
        """
        pieces = list(self._pieces(plan))
        for at, piece in enumerate(pieces):
            rest = pieces[at:]
            batch = self._source.fetch(piece, self._ids(piece), lambda rest=rest: self._ahead(rest, future))  # type: ignore[misc]
            yield piece.examples, to_device(batch, self._device, self._pin)

    def forget(self) -> None:
        """Drop remembered orders and prefetched data: they come from a state that has been replaced."""
        self._permutations.clear()
        self._source.forget()

    def close(self) -> None:
        """End the loader processes."""
        self._source.close()

    def _ids(self, piece: Piece) -> Tensor:
        if piece.epoch not in self._permutations:
            # While looking ahead, two epochs are in use: the present one and the next.
            self._permutations = {e: p for e, p in self._permutations.items() if e >= piece.epoch - 1}
            self._refuse_another_length(piece.epoch)
            self._permutations[piece.epoch] = self._order.permutation(self.length, piece.epoch, self._seed)
        order = self._permutations[piece.epoch]
        spans = [order.narrow(0, start, stop - start) for start, stop in piece.spans]
        return spans[0] if len(spans) == 1 else torch.cat(spans)

    def _refuse_another_length(self, epoch: int) -> None:
        now = len(self._dataset)  # type: ignore[arg-type]
        if now != self.length:
            raise LoopError(
                f"the data set has {now} examples at the beginning of epoch {epoch}, and had {self.length} when the "
                "run was made; make a new Run for other data"
            )

    def _pieces(self, plan: Plan) -> Iterator[Piece]:
        return (Piece(plan.epoch, plan.spans(start, stop)) for start, stop in plan.pieces(self._rank))

    def _ahead(self, rest: list[Piece], future: Callable[[], Iterable[Plan]]) -> Iterator[Piece]:
        yield from rest
        for plan in future():
            if plan.epoch > rest[0].epoch and not self._order.foresees:
                return
            yield from self._pieces(plan)


def to_device(batch: Any, device: torch.device, pin: bool = False) -> Any:
    """Move every tensor in a batch (nested lists, tuples, dicts) to a device, through pinned memory if asked."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        pinned = batch.pin_memory() if pin and batch.device.type == "cpu" and not batch.is_pinned() else batch
        return pinned.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device, pin) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, pin) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device, pin) for value in batch)
    return batch
