"""How workers find each other at the start, also when a launcher starts them again."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from paceline.errors import WorkerLost

__all__ = ["begin_group", "end_group", "store_of_this_run"]


def begin_group(deadline: float, limit: timedelta) -> None:
    """Start torch's process group from the environment; ``limit`` is for the waits of its collectives."""
    began = time.monotonic()
    try:
        _begin_group("nccl" if torch.cuda.is_available() else "gloo", deadline, limit)
    except dist.DistError as error:  # torch's own, which names a key of its store and no worker
        # Torch counts this group as if it had been made: another start of this process would look for one more.
        dist.distributed_c10d._world.group_count = 0
        seconds, variables = time.monotonic() - began, ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        rank, size, host, port = (os.environ[name] for name in variables)
        raise WorkerLost(
            f"rank {rank} waited {seconds:.1f} s for all {size} workers to start and meet at {host}:{port}: "
            f"{str(error).splitlines()[0]}; see which of them did not start or cannot reach that address",
            ranks=(),
            waited_for="all workers to start",
            seconds=seconds,
        ) from error


def _begin_group(backend: str, deadline: float, limit: timedelta) -> None:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=limit)
        return
    # The launcher's store outlives workers that it starts again, with the addresses of those before (pytorch issue
    # 135712); what it tells them of restarts is not the same on all machines.
    store, rank, size = next(rendezvous("env://", timeout=limit))
    fresh = PrefixStore(f"paceline/{_agree_on_attempt(store, rank, size, deadline)}", store)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=size, timeout=limit)


def _agree_on_attempt(store: Store, rank: int, size: int, deadline: float) -> str:
    """A name that rank 0 makes up for this start of the workers, on a store that may hold anything of earlier ones.

    Each other worker asks under a name of its own, so that the answer cannot be an old one; rank 0 answers every
    question that it finds, also old ones, until all workers of this start have said that they are here.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + deadline
    answer, missing = f"paceline/answer/{own}", set(range(1, size)) if rank == 0 else {0}
    if rank:
        store.set(f"paceline/ask/{rank}", own)
    while missing:
        if rank and store.check([answer]):
            own = store.get(answer).decode()
            store.set(f"paceline/here/{own}/{rank}", "")
            return own
        for other in [] if rank else list(missing):
            if store.check([f"paceline/ask/{other}"]):
                store.set(f"paceline/answer/{store.get(f'paceline/ask/{other}').decode()}", own)
            if store.check([f"paceline/here/{own}/{other}"]):
                missing.discard(other)
        if time.monotonic() > end:
            raise WorkerLost(
                f"rank {rank} waited {deadline:g} s for all workers to start: ranks {sorted(missing)} did not come",
                ranks=tuple(sorted(missing)),
                waited_for="all workers to start",
                seconds=deadline,
            )
        time.sleep(0.005)
    return own


def store_of_this_run() -> Store:
    """Torch's store under a prefix of our own, fresh for each run of a process group."""
    number = torch.randint(2**62, (1,), generator=torch.Generator().manual_seed(time.time_ns()))
    if dist.get_backend() == "nccl":
        number = number.cuda()
    dist.broadcast(number, src=0)
    return PrefixStore(f"paceline/{int(number.item())}", dist.distributed_c10d._get_default_store())


def end_group() -> None:
    """End torch's process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
