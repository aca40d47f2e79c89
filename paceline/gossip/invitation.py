"""How a worker that is started again finds the swarm that it belongs to: a file with the key and some addresses."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import msgspec

from paceline.errors import SettingError
from paceline.gossip.keys import Secret

__all__ = ["Invitation", "accept", "answers", "invite", "withdraw"]

KNOCK = 1.0  # seconds for a member to take a connection


class Invitation(msgspec.Struct, frozen=True):
    """What one has to know to come to a swarm."""

    secret: Secret
    size: int
    """Workers that began."""
    addresses: list[str]
    """Where they listened then; those that came later are heard of from them."""


def invite(path: Path, invitation: Invitation) -> None:
    """Write it, for the eyes of this user alone: who has it belongs to the run."""
    try:
        _replace(path, msgspec.json.encode(invitation))
    except OSError as error:
        raise SettingError(
            f"the invitation {path} cannot be written ({error.strerror}); give a file in a folder where you may write"
        ) from error


def _replace(path: Path, content: bytes) -> None:
    """Through a draft that is new: one that was there could be a link, or open to others who would read the key."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    number = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(number, "wb") as file:
            file.write(content)
        draft.replace(path)
    except BaseException:  # a key must not lie around
        draft.unlink(missing_ok=True)
        raise


def accept(path: Path) -> Invitation | None:
    """Read it; None if there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Invitation)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingError(
            f"{path} is not an invitation to a swarm ({error}); remove it, or give another file"
        ) from error


def answers(invitation: Invitation) -> bool:
    """Whether anybody still listens at one of the addresses: the file may be left over from a run that has died."""
    for address in invitation.addresses:
        found = re.fullmatch(r"tcp://(.+):(\d+)", address)
        if found is None:
            continue
        try:
            with socket.create_connection((found[1], int(found[2])), timeout=KNOCK):
                return True
        except OSError:
            continue
    return False


def withdraw(path: Path) -> None:
    """The swarm has come to its end: nobody can come any more."""
    path.unlink(missing_ok=True)
