"""A file that survives the death of its writer."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from paceline.errors import SettingError

__all__ = ["AppendFile", "cannot_open", "give_up"]


def cannot_open(what: str, path: Path, error: OSError) -> SettingError:
    """The error for a recorder that cannot even begin."""
    reason = error.strerror or str(error)
    return SettingError(f"cannot write {what} to {path} ({reason}); pass a path that this process may write to")


def give_up(what: str, reason: object) -> None:
    """Warn that a recorder stops in the middle of a run: a log is no reason for the training to die."""
    warnings.warn(
        f"{what} cannot be written any more ({reason}); the run goes on without it",
        RuntimeWarning,
        stacklevel=4,
    )


class AppendFile:
    """A file of lines to which whole lines are added, each handed to the operating system at once.

    Nothing is buffered here, so a killed process loses at most a part of the line that it was writing; there is no
    ``fsync``, so a power cut may lose more. On opening, a torn last line is cut off and the writing goes on behind the
    last whole one. ``signature`` is what every such file begins with: a file of another kind is refused. ``header``
    opens a new file; ``footer`` ends a closed one, and is cut off when the writing goes on.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        what: str,
        *,
        signature: bytes,
        header: bytes = b"",
        footer: bytes = b"",
    ) -> None:
        self.path = Path(path)
        self.what = what
        self.size = 0
        self._signature = signature
        self._header = header
        self._footer = footer
        self._descriptor = -1
        self._failed = False
        try:
            self._open()
        except OSError as error:
            self._let_go()
            raise cannot_open(what, self.path, error) from error

    def write(self, lines: bytes) -> None:
        """Add whole lines. Opens a closed file again; does nothing after a failure, which is warned of once."""
        if self._failed:
            return
        try:
            if self._descriptor < 0:
                self._open()
            self._append(lines)
        except OSError as error:
            self._failed = True
            self._let_go()
            give_up(f"{self.what} ({self.path})", error.strerror or error)

    def close(self) -> None:
        """Write the footer and close; may be called twice."""
        if self._descriptor >= 0:
            self.write(self._footer)
            self._let_go()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        size = os.fstat(self._descriptor).st_size
        head = os.pread(self._descriptor, min(size, len(self._signature)), 0)
        if not self._signature.startswith(head):
            self._let_go()
            # Cutting the last line off a file that is not ours would destroy it.
            raise SettingError(f"{self.path} exists and does not hold {self.what}; pass another path or remove it")
        self.size = self._whole_lines(size)
        if self.size < size:
            os.ftruncate(self._descriptor, self.size)
        if self.size == 0:
            self._append(self._header)

    def _whole_lines(self, size: int) -> int:
        """How many bytes at the front are whole lines, the footer left out."""
        end = size
        while end > 0:
            start = max(0, end - 65536)
            newline = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        tail = end - len(self._footer)
        if self._footer and tail >= 0 and os.pread(self._descriptor, len(self._footer), tail) == self._footer:
            return tail
        return end

    def _append(self, lines: bytes) -> None:
        while lines:  # a second turn only where the disk is full, to learn the reason
            written = os.write(self._descriptor, lines)
            self.size += written
            lines = lines[written:]

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
