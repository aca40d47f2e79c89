"""Arrays that are slow to make, kept on disk for the next time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import SettingError

__all__ = ["cache_folder", "cached"]

Array = NDArray[Any]


def cache_folder() -> Path:
    """What ``PACELINE_CACHE`` names, or ``~/.cache/paceline``."""
    return Path(os.environ.get("PACELINE_CACHE") or "~/.cache/paceline").expanduser()


def cached(folder: Path, names: Sequence[str], make: Callable[[], Mapping[str, Array]]) -> dict[str, Array]:
    """The arrays of these names, from ``.npy`` files in a folder; ``make`` is called if they are not there.

    Of several processes that come at once, one makes them and the others wait. The arrays are mapped
    copy-on-write, so that all processes of a machine share one copy in memory.
    """
    found = _open(folder, names)
    if found is not None:
        return found
    with _writing(folder):
        found = _open(folder, names)  # another process may have made them while this one waited
        if found is None:
            for name, array in make().items():
                _write(folder / f"{name}.npy", array)
            found = _open(folder, names)
            assert found is not None, f"not all of {names} were made"
    return found


def _open(folder: Path, names: Sequence[str]) -> dict[str, Array] | None:
    try:
        return {name: np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False) for name in names}
    except (FileNotFoundError, NotADirectoryError, ValueError, EOFError):  # not there, or not whole
        return None


def _write(path: Path, array: Array) -> None:
    part = path.with_suffix(".part")  # one name is enough: only the holder of the lock writes
    try:
        with part.open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise _unwritable(folder, error) from error
    with lock:  # closing it gives the lock back
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unwritable(path: Path, error: OSError) -> SettingError:
    return SettingError(
        f"cannot write {path} of the cache ({error.strerror}); "
        "set PACELINE_CACHE to a folder that can be written and has room"
    )
