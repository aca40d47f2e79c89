"""hivemind: local updates, models averaged in the background with 8 bits a number."""

from __future__ import annotations

import hivemind
import torch.nn.functional as F
from hivemind.compression import Float16Compression, SizeAdaptiveCompression, Uniform8BitQuantization
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.contestants.job import Job
from benchmarks.contestants.network import meeting_place, own_address
from benchmarks.contestants.race import Race

# The documentation recommends 3 to 5 s of matchmaking in small local runs. A round in the background takes at least as
# long, so it is begun after more steps than the other contestants' averages; with fewer, workers would wait for the
# round before.
MATCHMAKING_SECONDS = 5.0
TIMEOUT_SECONDS = 20.0
BATCHES = 256


def join(job: Job, meeting: TCPStore) -> hivemind.DHT:
    """Enter the swarm, as a peer of all workers before this one.

    The first alone would do on the internet. With private addresses and no route to anywhere else, as in the lab, peers
    that were not connected by hand do not find each other ("routing: not found").
    """
    peers = [one for rank in range(job.rank) for one in meeting.get(f"peer-{rank}").decode().split()]
    dht = hivemind.DHT(host_maddrs=[f"/ip4/{own_address()}/tcp/0"], initial_peers=peers, start=True)
    meeting.set(f"peer-{job.rank}", " ".join(map(str, dht.get_visible_maddrs())))
    return dht


def main() -> None:
    job = Job.from_command_line()
    meeting = meeting_place()  # lives as long as rank 0 keeps it
    dht = join(job, meeting)
    model = job.model()
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="contest",
        params=model.parameters(),
        optimizer=job.optimizer,
        batch_size_per_step=job.settings.batch,
        target_batch_size=job.settings.batch * job.workers * BATCHES,
        use_local_updates=True,
        matchmaking_time=MATCHMAKING_SECONDS,
        averaging_timeout=TIMEOUT_SECONDS,
        next_chunk_timeout=TIMEOUT_SECONDS / 2,
        # As in hivemind's own example: 8 bits where they pay.
        state_averaging_compression=SizeAdaptiveCompression(
            threshold=2**16 + 1, less=Float16Compression(), greater_equal=Uniform8BitQuantization()
        ),
        verbose=True,
    )
    for x, y in Race(job, model, lockstep=None):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
