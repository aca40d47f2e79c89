"""Loader processes: that they start, and that they end."""

from __future__ import annotations

import gc
import multiprocessing
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.loader import Fetch, Loader, Piece
from tests.pool import Pool


class Collects(Dataset[Tensor]):
    """Clears away whatever garbage there is in the process that reads it; example 3 cannot be read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> Tensor:
        gc.collect()
        if at == 3:
            raise OSError("cannot read example 3")
        return torch.tensor(at)


class Cycle:
    """An object that only the garbage collector can clear away, and that must not end in another process."""

    def __init__(self) -> None:
        self.itself, self.process = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os._exit(1)


def loader(num_workers: int = 1) -> Loader:
    fetch = Fetch(Collects(), torch.stack, seed=0)
    return Loader(fetch, lambda piece: torch.arange(*piece.spans[0]), num_workers, 2, False, 30.0)


def fetched(source: Loader, start: int, stop: int) -> Any:
    piece = Piece(0, ((start, stop),))
    return source.fetch(piece, torch.arange(start, stop), lambda: iter([piece]))


def with_garbage() -> list[int]:
    gc.collect()
    gc.disable()  # the garbage must still be there when the loader process is forked
    try:
        Cycle()
        source = loader()
        found: list[int] = fetched(source, 0, 2).tolist()
        source.close()
        assert not gc.isenabled()  # as it was
        return found
    finally:
        gc.enable()


def test_a_forked_loader_process_leaves_the_garbage_of_its_parent_alone(pool: Pool) -> None:
    """The end of a store, say, waits for its thread, which a forked process does not have: it crashes."""
    assert pool.run(1, with_garbage) == [[0, 1]]


def children_when_data_cannot_be_read() -> int:
    source = loader(num_workers=2)
    with pytest.raises(OSError, match="cannot read example 3"):
        fetched(source, 2, 4)
    alive = len(multiprocessing.active_children())
    assert fetched(source, 0, 2).tolist() == [0, 1]  # it can be asked again
    source.close()
    return alive + len(multiprocessing.active_children())


def test_loader_processes_end_with_the_error(pool: Pool) -> None:
    """Even while the exception, whose traceback refers to them, is under way."""
    assert pool.run(1, children_when_data_cannot_be_read) == [0]
