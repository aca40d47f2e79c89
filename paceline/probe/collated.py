"""A collated batch, and the examples in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from paceline.errors import SettingError

__all__ = ["Batch"]


@dataclass(frozen=True)
class Batch:
    """A collated batch: tensors whose leading dimension counts the examples, and other things."""

    leaves: list[Any]
    structure: pytree.TreeSpec
    length: int

    @classmethod
    def of(cls, batch: Any) -> Batch:
        """Look for the examples in what a loader gave."""
        leaves, structure = pytree.tree_flatten(batch)
        lengths = {len(leaf) for leaf in leaves if _has_examples(leaf)}
        if len(lengths) != 1:
            raise SettingError(
                f"the tensors of a batch have leading dimensions {sorted(lengths)}, so its examples cannot be told "
                "apart; collate them along dimension 0, or measure micro-batches: Probe(unit=MicroBatch())"
            )
        return cls(leaves, structure, lengths.pop())

    @property
    def tensors(self) -> list[Tensor]:
        """Those that hold the examples."""
        return [leaf for leaf in self.leaves if _has_examples(leaf)]

    def part(self, which: slice) -> Batch:
        """Some of the examples."""
        leaves = [leaf[which] if _has_examples(leaf) else leaf for leaf in self.leaves]
        return Batch(leaves, self.structure, len(range(self.length)[which]))

    def of_one(self, example: Iterable[Tensor]) -> Any:
        """The same with one example in it."""
        tensors = iter(example)
        leaves = [next(tensors).unsqueeze(0) if _has_examples(leaf) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.structure)


def _has_examples(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0
