"""What torchft's two contestants share: a replica of one worker, and the lighthouse on rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from benchmarks.contestants.job import Job
from benchmarks.contestants.network import meeting_place, own_address, part

__all__ = ["replica"]

PATIENCE = timedelta(seconds=120)  # the default of 60 s is too short where a slow worker needs long for its H steps


@contextmanager
def replica(job: Job, state: dict[str, Any]) -> Iterator[Manager]:
    """A manager for this worker; ``state`` has what a worker that recovers would be given."""
    meeting, address = meeting_place(), own_address()
    staying = [rank for rank in range(job.workers) if rank != job.settings.lost]
    lighthouse = None
    if job.rank == 0:
        # All that are alive must take part: otherwise a fast one would go on alone, and there would be as many models.
        wait = int(1000 * PATIENCE.total_seconds())
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=len(staying), join_timeout_ms=wait)
        port = lighthouse.address().rpartition(":")[2]
        meeting.set("lighthouse", f"http://{address}:{port}")
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=lambda states: [state[name].load_state_dict(one) for name, one in states.items()],
        state_dict=lambda: {name: one.state_dict() for name, one in state.items()},
        min_replica_size=len(staying),
        use_async_quorum=False,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=meeting.get("lighthouse").decode(),
        replica_id=f"worker_{job.rank}",
        hostname=address,
        init_sync=False,  # the weights are equal
    )
    try:
        yield manager
        part(meeting, job.rank, staying)  # the lighthouse, and connections that a slower worker still needs
    finally:
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()
