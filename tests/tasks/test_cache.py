from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from paceline.errors import SettingError
from paceline.tasks.cache import Array, cache_folder, cached


class Maker:
    """Makes two arrays and counts how often it was asked to."""

    def __init__(self, seconds: float = 0) -> None:
        self.calls = 0
        self.seconds = seconds

    def __call__(self) -> dict[str, Array]:
        self.calls += 1
        time.sleep(self.seconds)
        return {"a": np.arange(1000), "b": np.arange(5, dtype=np.uint8)}


def assert_sound(arrays: dict[str, Array]) -> None:
    np.testing.assert_array_equal(arrays["a"], np.arange(1000))
    np.testing.assert_array_equal(arrays["b"], np.arange(5, dtype=np.uint8))


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "paceline"
    monkeypatch.setenv("PACELINE_CACHE", "~/elsewhere")
    assert cache_folder() == tmp_path / "elsewhere"


def test_arrays_are_made_once(tmp_path: Path) -> None:
    make = Maker()
    for _ in range(3):
        assert_sound(cached(tmp_path / "new" / "folder", ["a", "b"], make))
    assert make.calls == 1


@pytest.mark.parametrize("keep", [0, 50, 200])
def test_a_damaged_file_is_made_again(tmp_path: Path, keep: int) -> None:
    make = Maker()
    cached(tmp_path, ["a", "b"], make)
    path = tmp_path / "a.npy"
    path.write_bytes(path.read_bytes()[:keep])
    assert_sound(cached(tmp_path, ["a", "b"], make))
    assert make.calls == 2


def test_a_pickle_in_the_place_of_an_array_is_not_opened(tmp_path: Path) -> None:
    make = Maker()
    (tmp_path / "a.npy").write_bytes(pickle.dumps(np.arange(1000)))
    np.save(tmp_path / "b.npy", np.arange(5, dtype=np.uint8))
    assert_sound(cached(tmp_path, ["a", "b"], make))
    assert make.calls == 1


def test_a_process_that_dies_while_writing_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Maker()

    def dying_save(file: IO[bytes], array: Array, **_: Any) -> None:
        file.write(b"\x93NUMPY half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", dying_save)
        with pytest.raises(KeyboardInterrupt):
            cached(tmp_path, ["a", "b"], make)
    assert not list(tmp_path.glob("*.npy"))
    assert_sound(cached(tmp_path, ["a", "b"], make))


def test_of_many_at_once_one_makes_and_the_others_wait(tmp_path: Path) -> None:
    make = Maker(seconds=0.3)  # long enough that all have come before it ends
    results: list[dict[str, Array]] = []
    threads = [threading.Thread(target=lambda: results.append(cached(tmp_path, ["a", "b"], make))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert make.calls == 1
    assert len(results) == 4
    for arrays in results:
        assert_sound(arrays)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        SettingError, match=r"cannot write .*file/below of the cache \(Not a directory\).*PACELINE_CACHE"
    ):
        cached(tmp_path / "file" / "below", ["a", "b"], Maker())


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(SettingError, match=r"a.npy of the cache \(No space left on device\).*PACELINE_CACHE"):
        cached(tmp_path, ["a", "b"], Maker())
