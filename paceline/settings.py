"""Settings of a run that are no roles: whether each is what it should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.checkpoint import Checkpoint
from paceline.errors import SettingError
from paceline.given import check_flags, is_number, is_whole

__all__ = ["check_settings"]

LONGEST = 1e9  # seconds: more do not fit into what torch waits with


def check_settings(
    micro: object,
    seed: object,
    deadline: object,
    scaler: object,
    stateful: object,
    record: object,
    checkpoint: object,
    **flags: object,
) -> None:
    """Refuse the first that is not; what it should be instead is in the error."""
    if micro is not None and not (is_whole(micro) and micro >= 1):
        raise SettingError(f"micro ({micro!r}) must be at least 1 example in a forward pass, an int, or None")
    if not is_whole(seed):
        raise SettingError(f"seed ({seed!r}) must be a whole number, an int")
    if not -(2**62) <= seed < 2**62:  # torch takes 64 bits, and workers with data of their own count on from it
        raise SettingError(f"seed ({seed}) must be from -2**62 to 2**62 - 1")
    if not is_number(deadline):
        raise SettingError(f"deadline ({deadline!r}) must be a number of seconds")
    if deadline > LONGEST:
        raise SettingError(f"deadline ({deadline}) must be at most {LONGEST:g} seconds, which is 30 years")
    check_flags("", **flags)
    if scaler is not None and not callable(getattr(scaler, "unscale_", None)):
        raise SettingError(f"scaler={scaler!r} must be a GradScaler, such as torch.amp.GradScaler()")
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        raise SettingError(f"checkpoint={checkpoint!r} must be a Checkpoint, such as Checkpoint('saves', every=100)")
    if stateful is not None:
        _check_stateful(stateful)
    if not _records(record):
        raise SettingError(
            f"record={record!r} must be a folder, or a list of recorders, such as record=[pl.record.Console()]"
        )


def _check_stateful(stateful: object) -> None:
    if not isinstance(stateful, Mapping):
        raise SettingError(
            f"stateful={stateful!r} must be objects by name, such as stateful={{'scheduler': scheduler}}"
        )
    for name, each in stateful.items():
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(each, method, None)):
                raise SettingError(f"stateful: {name!r} ({each!r}) has no method {method}, so that it cannot be saved")


def _records(record: object) -> bool:
    """Whether it is a folder, or recorders."""
    if isinstance(record, str | Path):
        return True
    if not isinstance(record, Sequence) or isinstance(record, bytes):
        return False
    return all(not isinstance(each, type) and callable(getattr(each, "record", None)) for each in record)
