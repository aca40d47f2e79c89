"""What Gossip refuses: settings that cannot be, and roles that make no sense where workers never come together."""

from __future__ import annotations

from torch.optim import SGD, Optimizer

from paceline.codec import Identity, Lattice
from paceline.errors import SettingError
from paceline.order.learnt import Learnt
from paceline.replica import Replica
from paceline.role_check import refuse_comparing
from paceline.sync.optimizer_state import Average, Keep

__all__ = ["refuse_moments", "refuse_roles", "refuse_run", "refuse_settings"]


def refuse_settings(graph: object, codec: object, optimizer_state: object) -> None:
    """What is wrong whatever the run is."""
    if not isinstance(codec, Lattice | Identity):
        raise SettingError(
            f"codec ({codec!r}) must be Lattice or Identity under Gossip: both partners have to see the very same two "
            "points, or the sum of their models is not kept"
        )
    if not callable(getattr(graph, "neighbours", None)) or isinstance(graph, type):
        raise SettingError(f"graph ({graph!r}) must be a graph, such as gossip.Complete() or gossip.Ring()")
    if not isinstance(optimizer_state, Keep | Average):
        raise SettingError(
            f"optimizer_state ({optimizer_state!r}) must be Keep() or Average() under Gossip: a pair meets while both "
            "train on, so that there is no moment at which momentum could begin anew"
        )


def refuse_roles(roles: dict[str, object], always: bool, local_data: bool, invited: bool) -> None:
    """What needs all workers at once."""
    order = roles["order"]
    if local_data and isinstance(order, Learnt):
        if not order.alone:
            raise SettingError(
                f"order={order!r} learns from the gradients of all workers, but under Gossip they never come together; "
                "let each learn from its own: order.PairBalance(streams=order.WorkerStreams(shared_sum=False)), or use "
                "sync.LocalSGD"
            )
        roles = roles | {"order": None}
    refuse_comparing(roles, always, "under Gossip they never come together", all_that_learn=True)
    if local_data and invited:
        raise SettingError(
            "an invitation is for a worker that comes back alone, which cannot know the lengths of the others' data "
            "sets; leave invitation= (or `--independent`) out, or share the data (local_data=False)"
        )


def refuse_run(size: int, replica: Replica) -> None:
    """What cannot be averaged in pairs."""
    if size == 1:
        raise SettingError("Gossip needs at least two workers; start more, or leave sync out")
    if replica.ddp is not None:
        raise SettingError(
            "DistributedDataParallel averages gradients in every step, which Gossip is there to avoid; give Run "
            "the bare module"
        )


def refuse_moments(optimizer: Optimizer, codec: Lattice | Identity) -> None:
    """Moments of Adam next to parameters in a lattice: its steps follow the parameters, which are far larger.

    A second moment that loses its digits is zero, or nearly, and Adam divides by its root.
    """
    if not isinstance(optimizer, SGD) and not isinstance(codec, Identity):
        raise SettingError(
            f"optimizer_state=Average() with {type(optimizer).__name__} needs full precision, and codec ({codec!r}) "
            "would round second moments, by which Adam divides, as coarsely as parameters; use codec=Identity(), or "
            "Keep()"
        )
