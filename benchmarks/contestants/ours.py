"""Paceline: the argument names the roles that differ from the defaults."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch.utils.data import TensorDataset

import paceline as pl
from benchmarks.contestants.job import Job
from benchmarks.contestants.network import own_address
from benchmarks.contestants.race import Race
from paceline.roles import Unmet

FOREVER = 10**9

GROWTH = 8  # the largest batch, as a multiple of the first
ETA = 0.7  # of the recipe
SAVES = 10.0  # seconds between two checkpoints, where a worker is killed


def _micro(job: Job) -> int:
    """Examples that are compared and ordered together: a quarter of a worker's first share."""
    return max(1, job.settings.batch // 4)


def _everything(job: Job, **more: Any) -> dict[str, Any]:
    """The recipe; ``more`` are its arguments."""
    return {**pl.recipes.everything(job.batch, GROWTH * job.batch, _micro(job), **more)}


def _norm_test(job: Job) -> dict[str, Any]:
    batch = pl.batch.NormTest(start=job.batch, limit=GROWTH * job.batch, eta=ETA)
    return {"batch": batch, "lr": pl.lr.AdaScale(base=job.batch), "micro": _micro(job)}


VARIANTS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "all-reduce": lambda job: {"sync": pl.sync.AllReduce()},
    "half": lambda job: {"sync": pl.sync.AllReduce(pl.codec.Half())},
    "by-speed": lambda job: {"sync": pl.sync.AllReduce(), "balance": pl.balance.BySpeed()},
    "local-sgd-by-speed": lambda job: {
        "sync": pl.sync.LocalSGD(job.settings.every),
        "balance": pl.balance.BySpeed(),
        "lockstep": job.settings.every,
    },
    "local-sgd": lambda job: {"sync": pl.sync.LocalSGD(job.settings.every), "lockstep": job.settings.every},
    "local-sgd-seldom": lambda job: {
        "sync": pl.sync.LocalSGD(job.settings.every * 2),
        "lockstep": job.settings.every * 2,
    },
    "local-sgd-8bit": lambda job: {
        "sync": pl.sync.LocalSGD(job.settings.every, codec=pl.codec.Uniform8()),
        "lockstep": job.settings.every,
    },
    "local-sgd-overlap": lambda job: {
        "sync": pl.sync.LocalSGD(job.settings.every, overlap=job.settings.every // 2),
        "lockstep": job.settings.every,
    },
    "local-sgd-seconds": lambda job: {"sync": pl.sync.LocalSGD(pl.sync.Seconds(2.0)), "lockstep": None},
    "local-sgd-short": lambda job: {"sync": pl.sync.LocalSGD(pl.sync.Seconds(0.4)), "lockstep": None},
    "gossip": lambda job: {"sync": pl.sync.Gossip(job.settings.every, bind=own_address()), "lockstep": None},
    "hierarchical": lambda job: {
        "sync": pl.sync.Hierarchical(job.settings.every // 4, job.settings.every * 2),
        "lockstep": job.settings.every * 2,
    },
    "norm-test": _norm_test,
    "pair-balance": lambda job: {"order": pl.order.PairBalance(), "micro": _micro(job)},
    "recipe-uneven": lambda job: {**pl.recipes.uneven(job.batch)},
    "recipe-slow-links": lambda job: {**pl.recipes.slow_links(job.batch, every=8), "lockstep": 8},
    "recipe-slow-links-seconds": lambda job: {
        **pl.recipes.slow_links(job.batch, every=pl.sync.Seconds(2.0)),
        "lockstep": None,
    },
    "recipe-unreliable": lambda job: {**pl.recipes.unreliable(job.batch, bind=own_address()), "lockstep": None},
    "recipe-everything": lambda job: {**_everything(job, every=4), "lockstep": 4},
    "recipe-everything-seconds": lambda job: {**_everything(job, every=pl.sync.Seconds(2.0)), "lockstep": None},
}
"""For each variant the arguments of ``Run``, and ``lockstep`` if workers wait for each other less than once a step."""


def main() -> None:
    job = Job.from_command_line()
    roles = VARIANTS[sys.argv[2]](job)
    lockstep = roles.pop("lockstep", 1)
    saves = job.folder / "saves"
    if job.settings.lost is not None:
        roles["checkpoint"] = pl.Checkpoint(saves, seconds=SAVES)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    race = Race(job, model, lockstep=lockstep)
    with pl.Run(
        model, optimizer, TensorDataset(job.x, job.y), **{"batch": job.batch, "seed": job.settings.seed, **roles}
    ) as run:
        if job.settings.lost is not None:
            run.resume(saves, missing_ok=True)
        steps = run.steps(steps=FOREVER)
        # A swarm keeps what a lost worker has given to it; a fleet goes back to its checkpoint.
        race.start(None if isinstance(run.sync, Unmet) else run.progress.step)
        for step in steps:
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            if race.step(step.plan.counts[job.rank]):
                break


if __name__ == "__main__":
    main()
