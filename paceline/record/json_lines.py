"""Events as JSON, one line each: the record that everything else can be computed from."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
from msgspec import inspect

from paceline.errors import PacelineError, SettingError
from paceline.events import Ended, Event, Gossiped, Measured, Remark, Resumed, Saved, Started, StepDone
from paceline.record.appending import AppendFile

__all__ = ["AnyEvent", "JsonLines", "read"]

AnyEvent = Started | StepDone | Gossiped | Measured | Remark | Saved | Resumed | Ended
"""Every event that a file may hold."""

_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
_shapes = {kind.__name__: inspect.type_info(kind) for kind in get_args(AnyEvent)}


class JsonLines:
    """Writes every event to a file, one line of JSON each.

    An existing file is continued, so the runs before and after a resume stand in one file. JSON has no NaN and no
    infinity: both become ``null``, and :func:`read` gives NaN for them.

    Example::

        run = Run(model, optimizer, dataset, record=[record.JsonLines("events.jsonl")])
    """

    patient = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = AppendFile(path, "events", signature=b'{"type":"')
        self._encode = msgspec.json.Encoder().encode

    def record(self, event: Event) -> None:
        """Hand one line to the operating system."""
        self._file.write(self._encode(event) + b"\n")

    def close(self) -> None:
        """Close the file; an event that comes later opens it again."""
        self._file.close()


def read(path: str | os.PathLike[str]) -> Iterator[AnyEvent]:
    """The events of a file that :class:`JsonLines` wrote, also while it is being written.

    A torn last line is left out. A damaged line before it is an error.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115  (closed by the with below; only this call may fail so)
    except OSError as error:
        raise SettingError(f"cannot read events from {os.fspath(path)} ({error.strerror})") from error
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                event = _decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise PacelineError(
                    f"{os.fspath(path)}, line {number} is not an event of a run ({error}); "
                    f"the file is damaged there: remove the line to read the others"
                ) from error
            yield event


def _decode(line: bytes) -> AnyEvent:
    try:
        return _decoder.decode(line)
    except msgspec.ValidationError:
        raw = msgspec.json.decode(line)
        shape = _shapes.get(raw.get("type")) if isinstance(raw, dict) else None
        if shape is None:
            raise
        # Rare, so it may be slow: a null stands where a number is expected.
        event: AnyEvent = msgspec.convert(_with_nan(raw, shape), AnyEvent)
        return event


def _with_nan(value: Any, shape: inspect.Type) -> Any:
    """The same value with NaN for every null whose place asks for a float and allows nothing else."""
    match shape, value:
        case inspect.FloatType(), None:
            return math.nan
        case inspect.ListType(item_type=inner), list():
            return [_with_nan(item, inner) for item in value]
        case inspect.DictType(value_type=inner), dict():
            return {key: _with_nan(item, inner) for key, item in value.items()}
        case inspect.StructType(fields=fields), dict():
            inside = {f.encode_name: _with_nan(value[f.encode_name], f.type) for f in fields if f.encode_name in value}
            return value | inside
        case inspect.UnionType(types=(inner, inspect.NoneType())), value if value is not None:
            return _with_nan(value, inner)
    return value
