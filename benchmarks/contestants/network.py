"""How workers find each other before they can talk: by addresses alone, since names may not resolve."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["meeting_place", "own_address", "part"]


def own_address() -> str:
    """This worker's address, as the others see it: that of the interface on the way to rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
        address: str = probe.getsockname()[0]
        return address


def meeting_place() -> TCPStore:
    """A key-value store that all can reach, for peers that do not use torch's process group.

    Rank 0 hosts it: it is there as long as rank 0 keeps what this gives.
    """
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=os.environ["RANK"] == "0",
    )


def part(meeting: TCPStore, rank: int, ranks: Iterable[int]) -> None:
    """Wait until all these workers have come here; rank 0, which hosts the store, goes last."""
    ranks = list(ranks)
    meeting.set(f"done-{rank}", "")
    meeting.wait([f"done-{other}" for other in ranks])
    meeting.set(f"gone-{rank}", "")
    if rank == 0:
        meeting.wait([f"gone-{other}" for other in ranks])
