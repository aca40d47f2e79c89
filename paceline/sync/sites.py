"""Which workers are near to each other."""

from __future__ import annotations

import os
import socket

from paceline.errors import SettingError
from paceline.fleet import Fleet

__all__ = ["SITE", "find_sites", "own_site"]

SITE = "PACELINE_SITE"


def own_site(given: str | None) -> str:
    """The name that was given, else that of the environment, else the host's."""
    if given is not None and not isinstance(given, str):
        raise SettingError(f"site ({given!r}) must be the name of a site, such as site='{given}'")
    return given or os.environ.get(SITE) or socket.gethostname()


def find_sites(fleet: Fleet, name: str) -> dict[str, list[int]]:
    """The ranks of every site, in the order of their first ranks; there must be several sites, unless one worker."""
    names = [blob.decode() for blob in fleet.gather(name.encode(), "the names of the others' sites")]
    sites = {each: [rank for rank, other in enumerate(names) if other == each] for each in dict.fromkeys(names)}
    if len(sites) == 1 and fleet.size > 1:
        raise SettingError(
            f"all {fleet.size} workers are at the site '{name}', so there is nothing between sites; give each worker "
            f"the name of its site (site=…, or the variable {SITE}), or use LocalSGD"
        )
    return sites
