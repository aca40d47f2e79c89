"""A folder of checkpoints: when one is due, how it comes there whole, and which is the newest that is sound.

A file comes to its name only when it is whole and on the disk, so that a kill at any byte leaves the earlier files as
they were. What is in it is the matter of ``checkpoint_file``.

All of this is for rank 0; the other workers are sent the bytes of :func:`read` and give them to :func:`parse`. Only
where workers never meet, each has files of its own, in a folder of its own.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.checkpoint_file import parse, read, reason, serial_of, write_whole
from paceline.errors import CheckpointError, SettingError
from paceline.plain import plain_tree

__all__ = ["Checkpoint", "clean", "find", "load_newest", "own_folder", "parse", "read", "write"]

_NAME = re.compile(r"step-(\d{8,})\.ckpt")
_PART = re.compile(r"\..+\.(\d+)\.part")


def write(path: Path, tree: dict[str, Any]) -> int:
    """Save a tree to a file and give the bytes written; an existing file is replaced in one go or not at all.

    The tree may hold ``None``, bool, int, float, complex, str, bytes, tensors, and lists, tuples, sets and dicts of
    these. Tensors come back detached and on the CPU, a ``defaultdict`` comes back as a dict.
    """
    plain = plain_tree(tree)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        clean(path.parent)
        # Not the clock, which differs between machines, and not the step: who goes back to step 100 and trains on
        # has a newer checkpoint at step 110 than the abandoned one at step 200.
        serial = 1 + max((serial or 0 for _, serial in _ranked(path.parent)), default=0)
        size = write_whole(part, plain, serial)
        os.replace(part, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot save the checkpoint {path}: {reason(error)}; {_remedy(error)} (earlier checkpoints are untouched)"
        ) from error
    except RuntimeError as error:
        raise CheckpointError(
            f"cannot save the checkpoint {path}: torch.save refused its content: {error} "
            "(earlier checkpoints are untouched)"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return size


def find(path: Path) -> Iterator[Path]:
    """The checkpoints that a path stands for: a file for itself, a folder for its ``step-*.ckpt``, newest first."""
    try:
        if path.is_dir():
            return iter([file for file, _ in _ranked(path)])
        if path.exists():
            return iter([path])
    except OSError as error:
        raise CheckpointError(
            f"cannot look for checkpoints at {path}: {reason(error)}; check the path and its permissions"
        ) from error
    raise CheckpointError(f"there is no checkpoint {path}: no such file or folder; check the path")


def load_newest(path: Path) -> tuple[Path, bytes]:
    """The newest sound checkpoint of a folder and its payload, with a warning for every damaged one that is newer.

    A file that is named itself must be sound: another one in its place could be a surprise.
    """
    files = list(find(path))
    if files == [path]:
        return path, read(path)
    refusals: list[str] = []
    for file in files:
        try:
            payload = read(file)
        except CheckpointError as error:
            refusals.append(str(error))
            continue
        for refusal in refusals:
            warnings.warn(f"{refusal}. Going on from {file}", stacklevel=2)
        return file, payload
    if not refusals:
        raise CheckpointError(f"the folder {path} holds no checkpoint (step-*.ckpt); check the path, or name the file")
    raise CheckpointError(
        f"no checkpoint in the folder {path} is sound; start anew, or use a copy:\n  " + "\n  ".join(refusals)
    )


def clean(folder: Path) -> None:
    """Remove what killed processes left half written: the files of this process and of those that have ended.

    A process on another machine cannot be seen from here, so a folder is for one run at a time.
    """
    for file in folder.iterdir():
        match = _PART.fullmatch(file.name)
        if match and (int(match[1]) == os.getpid() or not _alive(int(match[1]))):
            file.unlink(missing_ok=True)


def own_folder(folder: Path, rank: int) -> Path:
    """Where one worker's checkpoints or records are, where each has its own."""
    return folder / f"worker-{rank}"


class Checkpoint:
    """When a run saves itself, where, and how many of the files stay.

    A checkpoint is due after every ``every`` steps, and ``seconds`` after the last one; with neither, none ever is.
    The newest ``keep`` stay.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int | None = None,
        seconds: float | None = None,
        keep: int = 3,
    ) -> None:
        if every is not None:
            _check_whole("every", every)
        _check_whole("keep", keep)
        if seconds is not None and not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
            raise SettingError(f"seconds ({seconds!r}) is not a number above 0; give one, as in seconds=600")
        self.folder = Path(folder)
        self.every = every
        self.seconds = seconds
        self.keep = keep
        self._since: float | None = None

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.folder)!r}, every={self.every}, seconds={self.seconds}, keep={self.keep})"

    def of_worker(self, rank: int) -> Checkpoint:
        """The same for one worker, where each has its own."""
        return Checkpoint(own_folder(self.folder, rank), every=self.every, seconds=self.seconds, keep=self.keep)

    def due(self, step: int, now: float) -> bool:
        """Whether a checkpoint should be written after ``step`` steps, at ``now`` seconds of any steady clock.

        Clocks differ between workers, so with ``seconds`` one worker must ask and tell the others.
        """
        if self._since is None:
            self._since = now
        waited = now - self._since
        by_step = self.every is not None and step > 0 and step % self.every == 0
        return by_step or (self.seconds is not None and waited >= self.seconds)

    def mark(self, now: float) -> None:
        """Count ``seconds`` from here: the run began, or a checkpoint was written."""
        self._since = now

    def path(self, step: int) -> Path:
        """The file for the checkpoint after ``step`` steps."""
        return self.folder / _name(step)

    def newest(self) -> list[Path]:
        """The checkpoints that exist, newest first."""
        return list(find(self.folder)) if self.folder.is_dir() else []

    def prune(self) -> None:
        """Remove all but the newest ``keep``. A file without the mark of a checkpoint is left alone."""
        try:
            ours = [file for file, serial in _ranked(self.folder) if serial is not None]
            for file in ours[self.keep :]:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot remove old checkpoints from {self.folder}: {reason(error)}; {_remedy(error)}"
            ) from error


def _sync_folder(folder: Path) -> None:
    """Make a new name in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no fsync of a folder; the file itself is safe there.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def _ranked(folder: Path) -> list[tuple[Path, int | None]]:
    """The checkpoints of a folder with their serial numbers, newest first.

    Those whose number cannot be read come before all others, so that who looks for a checkpoint hears of them.
    """
    if not folder.is_dir():
        return []
    steps = {file: int(match[1]) for file in folder.iterdir() if (match := _NAME.fullmatch(file.name))}
    serials = {file: serial_of(file) for file in steps}

    def age(file: Path) -> tuple[bool, int, int]:
        serial = serials[file]
        return serial is None, serial or 0, steps[file]

    return [(file, serials[file]) for file in sorted(steps, key=age, reverse=True)]


def _name(step: int) -> str:
    return f"step-{step:08d}.ckpt"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _check_whole(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingError(f"{name} ({value!r}) is not a whole number of at least 1; give one, as in {name}=5")


def _remedy(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free some space, lower keep, or save to another disk"
    return "give a file name in a folder that can be written to"
