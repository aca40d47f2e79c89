"""Where the data files of the tasks are, and what to say when they are not there or not sound."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import DataMissing

__all__ = ["damaged", "data_folders", "find", "uninstalled"]


def data_folders(*below: str) -> list[Path]:
    """The folders ``below`` the one that ``PACELINE_DATA`` names, then that one; none if it is not set."""
    root = os.environ.get("PACELINE_DATA")
    if not root:
        return []
    top = Path(root).expanduser()
    return [*(top / name for name in below), top]


def find(task: str, files: Sequence[str], folders: Sequence[Path], remedy: str) -> list[Path]:
    """The files of a task, from the first folder that holds them all.

    Files of different folders are never mixed: MNIST and Fashion-MNIST, for one, have the same file names.
    """
    looked = [] if os.environ.get("PACELINE_DATA") else ["PACELINE_DATA, which is not set"]
    for folder in folders:
        missing = [file for file in files if not (folder / file).is_file()]
        if not missing:
            return [folder / file for file in files]
        part = len(missing) < len(files)
        looked.append(f"{folder} (without {', '.join(missing)})" if part else str(folder))
    raise DataMissing(f"{task} needs {', '.join(files)}; looked in {', '.join(looked)}; {remedy}")


def damaged(path: Path, why: object, remedy: str) -> DataMissing:
    """The error for a file that is there but cannot be used."""
    return DataMissing(f"{path} is damaged, or not the file that its name says: {why}; {remedy}")


def uninstalled(task: str, package: str) -> DataMissing:
    """The error for a package that a task needs and that is not installed."""
    return DataMissing(f"{task} needs {package}, which is not installed; pip install paceline[tasks]")
