"""Who takes part in the contest. One file a contestant; what they share needs torch and the standard library alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["HARD", "ROSTER", "SITES", "UNEVEN", "Contestant", "Return"]

Return = Literal["never", "together", "alone"]
"""What happens after a worker was killed: nothing; all begin again at their last checkpoint; or that one does."""


@dataclass(frozen=True)
class Contestant:
    """One way to train, and how to start it."""

    name: str
    """What it is called on the command line."""
    title: str
    """What it is called in the table."""
    module: str
    """Run with ``python -m MODULE JOBFOLDER ARGUMENTS`` on every worker."""
    arguments: tuple[str, ...] = ()
    environment: str | None = None
    """The folder of its environment below ``.peers``; None for the project's own."""
    note: str = ""
    """What was chosen for it, for the table's footnotes; ``{every}`` becomes the number of local steps."""
    comes_back: Return = "never"
    """After a worker was killed."""


OURS = f"{__name__}.ours"

ROSTER = [
    Contestant("ddp", "torch DDP", f"{__name__}.ddp"),
    Contestant("ddp-fp16", "torch DDP, fp16", f"{__name__}.ddp", ("fp16",), note="fp16_compress_hook"),
    Contestant(
        "post-local-sgd",
        "torch PostLocalSGD",
        f"{__name__}.post_local_sgd",
        note="H = {every}, no warm-up: gradients are never averaged",
    ),
    Contestant(
        "accelerate",
        "accelerate LocalSGD",
        f"{__name__}.accelerate_local_sgd",
        environment="accelerate",
        note="H = {every}",
    ),
    Contestant(
        "torchft-local-sgd",
        "torchft LocalSGD",
        f"{__name__}.torchft_local_sgd",
        environment="torchft",
        note="H = {every}",
    ),
    Contestant(
        "torchft-diloco",
        "torchft DiLoCo",
        f"{__name__}.torchft_diloco",
        environment="torchft",
        note="H = {every}; outer SGD with Nesterov momentum 0.9 and learning rate 0.7, as in the DiLoCo paper",
    ),
    Contestant(
        "decent-dp",
        "Decent-DP",
        f"{__name__}.decent_dp",
        environment="decent-dp",
        note="topology one-peer-exp for 2, 4, 8, … workers, else ring, for odd numbers complete",
    ),
    Contestant(
        "hivemind",
        "hivemind",
        f"{__name__}.hivemind_local",
        environment="hivemind",
        note="local updates; averaged in the background every 256 batches per worker, 8 bit (small tensors 16 bit), "
        "matchmaking 5 s; each worker stops by its own clock",
    ),
    Contestant(
        "adaptdl",
        "AdaptDL",
        f"{__name__}.adaptdl_adaptive",
        environment="adaptdl",
        note="starts with the batch of all, may raise it to 4 times as much; AdaScale rule for the learning rate",
    ),
    Contestant("paceline-all-reduce", "Paceline AllReduce", OURS, ("all-reduce",)),
    Contestant("paceline-local-sgd", "Paceline LocalSGD", OURS, ("local-sgd",), note="H = {every}"),
    Contestant(
        "paceline-local-sgd-8bit", "Paceline LocalSGD, 8 bit", OURS, ("local-sgd-8bit",), note="H = {every}, Uniform8"
    ),
    Contestant(
        "paceline-local-sgd-overlap",
        "Paceline LocalSGD, overlap",
        OURS,
        ("local-sgd-overlap",),
        note="H = {every}, half of the next round done meanwhile",
    ),
    Contestant(
        "paceline-gossip",
        "Paceline Gossip",
        OURS,
        ("gossip",),
        note="pairs average after {every} steps, 8 bit, encrypted; each worker stops by its own clock",
    ),
]

SITES = [
    Contestant("ddp", "torch DDP", f"{__name__}.ddp"),
    Contestant("paceline-local-sgd", "Paceline LocalSGD", OURS, ("local-sgd",), note="H = {every}"),
    Contestant(
        "paceline-local-sgd-seldom",
        "Paceline LocalSGD, as seldom",
        OURS,
        ("local-sgd-seldom",),
        note="twice {every} steps, as between sites",
    ),
    Contestant(
        "paceline-hierarchical",
        "Paceline Hierarchical",
        OURS,
        ("hierarchical",),
        note="a quarter of {every} steps inside of a site, twice {every} between sites",
    ),
]
"""For a cluster with sites."""

BY_SPEED = [
    Contestant("paceline-by-speed", "Paceline AllReduce, BySpeed", OURS, ("by-speed",)),
    Contestant(
        "paceline-local-sgd-by-speed",
        "Paceline LocalSGD, BySpeed",
        OURS,
        ("local-sgd-by-speed",),
        note="H = {every}, shares of the local batch",
    ),
    Contestant(
        "paceline-local-sgd-seconds",
        "Paceline LocalSGD, seconds",
        OURS,
        ("local-sgd-seconds",),
        note="averages every 2 seconds of work, however many steps that are",
    ),
    Contestant(
        "paceline-local-sgd-short",
        "Paceline LocalSGD, 0.4 seconds",
        OURS,
        ("local-sgd-short",),
        note="averages every 0.4 seconds of work: of the fastest worker some 16 steps of the CNN",
    ),
]

UNEVEN = [*ROSTER[: next(at for at, each in enumerate(ROSTER) if each.module == OURS) + 2], *BY_SPEED]
"""For a cluster of workers of different speeds: the peers, and shares by speed."""

METHODS = [
    Contestant(
        "paceline-half", "Paceline AllReduce, half", OURS, ("half",), note="gradients travel in half precision (Half)"
    ),
    Contestant(
        "paceline-norm-test",
        "Paceline NormTest, AdaScale",
        OURS,
        ("norm-test",),
        note="AllReduce; the batch may grow to 8 times as much (eta = 0.7)",
    ),
    Contestant(
        "paceline-pair-balance",
        "Paceline PairBalance",
        OURS,
        ("pair-balance",),
        note="AllReduce; orders a quarter of a worker's batch together",
    ),
]

RECIPES = [
    Contestant("uneven", "recipe uneven", OURS, ("recipe-uneven",)),
    Contestant("slow-links", "recipe slow_links", OURS, ("recipe-slow-links",)),
    Contestant(
        "slow-links-seconds",
        "recipe slow_links, seconds",
        OURS,
        ("recipe-slow-links-seconds",),
        note="every = Seconds(2.0)",
    ),
    Contestant(
        "unreliable", "recipe unreliable", OURS, ("recipe-unreliable",), note="each worker stops by its own clock"
    ),
    Contestant(
        "everything", "recipe everything", OURS, ("recipe-everything",), note="the batch may grow to 8 times as much"
    ),
    Contestant(
        "everything-seconds",
        "recipe everything, seconds",
        OURS,
        ("recipe-everything-seconds",),
        note="the same with every = Seconds(2.0)",
    ),
]

GOSSIP = ("gossip", "recipe-unreliable")
"""The variants of ours whose workers survive each other."""


def _coming_back(one: Contestant) -> Contestant:
    """Ours can be started again: all of them, or, with gossip, the lost one."""
    if one.module != OURS:
        return one
    return replace(one, comes_back="alone" if one.arguments[0] in GOSSIP else "together")


HARD = [_coming_back(one) for one in [*ROSTER, *BY_SPEED, *METHODS, *RECIPES]]
"""For a cluster that is hard in each way: the peers, each method alone, and the recipes."""
