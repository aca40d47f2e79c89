"""Trees of plain values and tensors: what a file may hold so that reading it runs no code."""

from __future__ import annotations

import codecs
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import CheckpointError

__all__ = ["a", "plain_tree"]

# What torch.load(weights_only=True) takes as it is.
_VALUES = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size)
_KEYS = (type(None), bool, int, float, str)
_DEEPEST = 100


class _EmptyBytes:
    """Stands for ``b""``, which torch.save writes as a call that a weights-only load refuses; it takes this one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return codecs.encode, ("", "latin1")


def plain_tree(tree: dict[str, Any]) -> Any:
    """A copy of the tree that surely loads again with ``weights_only``; the tensors are not copied."""
    return _plain(tree, ())


def _plain(value: Any, where: tuple[Any, ...]) -> Any:
    kind = type(value)
    if not where and not isinstance(value, dict):
        raise CheckpointError(f"a checkpoint is a dict, not {a(value)}; put it into one")
    if len(where) > _DEEPEST:
        raise CheckpointError(f"{_show(where)} is nested too deep for a checkpoint, or contains itself; flatten it")
    if kind in _VALUES:
        # Longer ones have an instruction of their own, which a weights-only load does not know.
        if kind is int and value.bit_length() >= 255 * 8:
            raise CheckpointError(f"{_show(where)} is an int of {value.bit_length():,} bits; keep it as a str")
        return _EmptyBytes() if kind is bytes and not value else value
    if kind in (Tensor, torch.nn.Parameter):
        return _plain_tensor(value, where)
    if kind in (list, tuple):
        return kind([_plain(item, (*where, at)) for at, item in enumerate(value)])
    if kind is set:
        return {_plain_key(item, where) for item in value}
    if kind in (dict, defaultdict, OrderedDict, Counter):
        items = {_plain_key(key, where): _plain(item, (*where, key)) for key, item in value.items()}
        if kind is Counter:
            return Counter(items)
        return _ordered(value, items, where) if kind is OrderedDict else items
    if isinstance(value, np.generic):
        remedy = "keep value.item() instead"
    elif isinstance(value, np.ndarray):
        remedy = "keep torch.from_numpy(value) instead"
    else:
        remedy = "give the object a state_dict made of plain values and tensors"
    raise CheckpointError(f"{_show(where)} is {a(value)}, which a checkpoint cannot hold; {remedy}")


def _ordered(value: Any, items: dict[Any, Any], where: tuple[Any, ...]) -> Any:
    copy: Any = OrderedDict(items)
    # The versions of the modules in a model's state, which load_state_dict looks at.
    if hasattr(value, "_metadata"):
        copy._metadata = _plain(value._metadata, (*where, "_metadata"))
    return copy


def _plain_key(key: Any, where: tuple[Any, ...]) -> Any:
    if type(key) not in _KEYS:
        raise CheckpointError(
            f"{_show(where)} has {a(key)} as a key or member, which a checkpoint cannot hold; use a str or an int"
        )
    return _plain(key, (*where, key))


def _plain_tensor(tensor: Tensor, where: tuple[Any, ...]) -> Tensor:
    odd = {"nested": tensor.is_nested, "quantized": tensor.is_quantized, "meta": tensor.is_meta}
    odd[str(tensor.layout)] = tensor.layout not in (torch.strided, torch.sparse_coo)
    kind = next((kind for kind, is_it in odd.items() if is_it), None)
    if kind is not None:
        raise CheckpointError(
            f"{_show(where)} is a tensor of the kind {kind}, which a checkpoint cannot hold; keep a dense one"
        )
    # Leaves behind the graph, hooks, and attributes that somebody set on it: only numbers are saved.
    tensor = tensor.detach()
    # torch.save writes whole storages: a slice would take all that it was cut from with it.
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes:
        return torch.empty_like(tensor, device="cpu").copy_(tensor)
    return tensor


def _show(where: tuple[Any, ...]) -> str:
    steps = (f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in where)
    text = "".join(steps).removeprefix(".") or "the tree"
    return text if len(text) <= 120 else f"{text[:119]}…"


def a(value: Any) -> str:
    """The type of a value, with its article, for messages."""
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
