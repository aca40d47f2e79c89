"""How a worker that is started again finds the swarm that it belongs to: a file with the key and some addresses."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from paceline.errors import SettingError
from paceline.gossip.keys import Secret
from paceline.gossip.sockets import knock

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
    """Through a draft that is new: one that was there could be a link, or open to others who would read the key.

    Its name is drawn, because workers of several machines may share the folder.
    """
    number, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # for this user alone
    try:
        with open(number, "wb") as file:
            file.write(content)
        os.replace(draft, path)
    except BaseException:  # a key must not lie around
        Path(draft).unlink(missing_ok=True)
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
    return any(knock(address, invitation.secret.keys, KNOCK) for address in invitation.addresses)


def withdraw(path: Path) -> None:
    """The swarm has come to its end: nobody can come any more."""
    path.unlink(missing_ok=True)
