"""One file of a checkpoint: a header (mark, format version, serial number, length and digest), then ``torch.save``'s.

What was written is read with ``torch.load(weights_only=True)``: no code of the file is ever run.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import struct
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from paceline.errors import CheckpointError
from paceline.plain import a

__all__ = ["parse", "read", "reason", "serial_of", "write_whole"]

_FORMAT = 2
# The line ends make a transfer in text mode visible, as in PNG.
_MARK = b"paceline-ckpt\r\n\x00"
_HEAD = struct.Struct("<16sQQQ")
"""Mark, format, serial number, length of the payload. A sha256 of the payload and of this follows."""
_HEADER_BYTES = _HEAD.size + hashlib.sha256().digest_size


def write_whole(path: Path, tree: Any, serial: int) -> int:
    """Write a new file, down to the disk, and give its bytes."""
    # "x" follows no link that someone else may have put there.
    with open(path, "xb") as file:
        file.write(bytes(_HEADER_BYTES))
        payload = _HashingWriter(file)
        try:
            torch.save(tree, cast(IO[bytes], payload))
        except Exception:
            if payload.failure is not None:
                raise payload.failure from None
            raise
        head = _HEAD.pack(_MARK, _FORMAT, serial, payload.length)
        payload.sha256.update(head)
        file.seek(0)
        file.write(head + payload.sha256.digest())
        file.flush()
        os.fsync(file.fileno())
    return _HEADER_BYTES + payload.length


def read(path: Path) -> bytes:
    """The payload of a checkpoint, after its length and its digest were found right."""
    try:
        if path.is_dir():
            raise CheckpointError(f"{path} is a folder, not a checkpoint; name a step-*.ckpt file in it")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(_HEADER_BYTES)
            head, digest = header[: _HEAD.size], header[_HEAD.size :]
            payload = file.read(_payload_bytes(path, head, size))
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}; check the path") from error
    except OSError as error:
        raise CheckpointError(
            f"cannot read the checkpoint {path}: {reason(error)}; check the path and its permissions"
        ) from error
    sha256 = hashlib.sha256(payload)
    sha256.update(head)
    if sha256.digest() != digest:
        raise CheckpointError(
            f"{path} does not match its digest: it was altered after it was written; use an earlier checkpoint"
        )
    return payload


def parse(payload: bytes) -> dict[str, Any]:
    """The tree of a payload, its tensors on the CPU."""
    try:
        tree = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:  # what is no tree of ours can fail in torch.load in any way
        # Its context is without torch's advice to load without weights_only, which would run the code in the file.
        why = str(error.__context__ or error).partition(". ")[0]
        raise CheckpointError(
            f"the content of the checkpoint is not made of plain values and tensors that torch {torch.__version__} "
            f"reads: {why or type(error).__name__}; use the versions of Paceline and torch that wrote it"
        ) from error
    if not isinstance(tree, dict):
        raise CheckpointError(f"the checkpoint holds {a(tree)} instead of a dict; Paceline did not write it")
    return tree


def serial_of(path: Path) -> int | None:
    """The serial number of a file; None if it is no checkpoint, or cannot be read."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD.size)
    except OSError:
        return None
    if len(head) < _HEAD.size or not head.startswith(_MARK):
        return None
    serial = int(_HEAD.unpack(head)[2])
    # No run writes that many: the byte is damaged, and the next number must still fit.
    return serial if serial < 2**62 else None


def reason(error: OSError) -> str:
    """What the system says, and its name for it."""
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, type(error).__name__)})"


class _HashingWriter:
    """What ``torch.save`` writes to: counts and hashes on the way to the file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()
        self.length = 0
        # torch.save closes its archive after an error, which fails too and hides the error (even Ctrl-C).
        self.failure: BaseException | None = None

    def write(self, data: memoryview) -> int:
        try:
            self.file.write(data)
        except BaseException as error:
            self.failure = error
            raise
        self.sha256.update(data)
        self.length += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing to do before the header is written."""


def _payload_bytes(path: Path, head: bytes, size: int) -> int:
    """The length of the payload by the head of a file of ``size`` bytes, after all that a head can tell was checked."""
    if not head.startswith(_MARK[: len(head)]):
        raise CheckpointError(
            f"{path} is not a Paceline checkpoint: it does not begin like one; give a file that Paceline wrote"
        )
    if size < _HEADER_BYTES:
        raise CheckpointError(
            f"{path} is cut short: {size:,} of at least {_HEADER_BYTES:,} bytes; use an earlier checkpoint"
        )
    _, version, _, length = _HEAD.unpack(head)
    if version != _FORMAT:
        raise CheckpointError(
            f"{path} has the checkpoint format {version}, and this Paceline reads format {_FORMAT}; "
            "use the version of Paceline that wrote it"
        )
    whole = _HEADER_BYTES + length
    if size != whole:
        wrong = "is cut short" if size < whole else "is too long"
        raise CheckpointError(f"{path} {wrong}: {size:,} of {whole:,} bytes; use an earlier checkpoint")
    return int(length)
