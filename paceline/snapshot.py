"""What a checkpoint holds: everything that determines the future of a run."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from paceline import checkpoint
from paceline.errors import CheckpointError
from paceline.identity import identity
from paceline.planner import Cursor
from paceline.roles import Learner, Stateful, Unmet

if TYPE_CHECKING:
    from paceline.run import Run

__all__ = ["find", "own_path", "own_policy", "restore", "resumed", "save", "take", "writes"]


def writes(run: Run) -> bool:
    """Whether this worker writes checkpoints: rank 0 for all, or, where they never meet, each for itself."""
    return run.fleet.rank == 0 or isinstance(run.sync, Unmet)


def own_path(run: Run, path: Path) -> Path:
    """The file that a worker writes to: where they never meet, in a folder of its own."""
    return checkpoint.own_folder(path.parent, run.fleet.rank) / path.name if isinstance(run.sync, Unmet) else path


def own_policy(run: Run) -> checkpoint.Checkpoint | None:
    """When and where this worker saves by itself."""
    policy = run.checkpoint
    return policy.of_worker(run.fleet.rank) if policy is not None and isinstance(run.sync, Unmet) else policy


def save(run: Run, path: Path) -> tuple[Path, int]:
    """Write a checkpoint of the run: all workers must call it. Gives the path and, on rank 0, the bytes."""
    own = run.sync.own_state()
    blob = _pack(own) if own else b""
    if isinstance(run.sync, Unmet):
        return path, checkpoint.write(path, {**take(run), "own_states": [blob], "worker": run.fleet.rank})
    own_states = run.fleet.collect_bytes(blob, "the states of all workers for a checkpoint")
    trouble, size = b"", 0
    with run.sync.consensus():
        tree = {**take(run), "own_states": own_states}
        if run.fleet.rank == 0:
            try:
                size = checkpoint.write(path, tree)  # here: the tree holds the model's own tensors
            except CheckpointError as error:
                trouble = str(error).encode()
    _raise_together(run, trouble, "rank 0 to write the checkpoint")
    return path, size


def find(run: Run, path: Path, missing_ok: bool) -> tuple[Path, dict[str, Any]] | None:
    """The newest sound checkpoint: rank 0 reads it and sends it to the others; None if there is none and may be.

    Where workers never meet, each reads its own; if there is none, one that is for all.
    """
    trouble, payload = b"", b""
    if isinstance(run.sync, Unmet):
        run.fleet.gather(b"", "the others to resume")  # an error before anything has changed, if they cannot any more
        own = checkpoint.own_folder(path, run.fleet.rank), own_path(run, path)
        path = next((each for each in own if _holds_one(each)), path)
        path, payload = _newest(path, missing_ok)
        return (path, checkpoint.parse(payload)) if payload else None
    if run.fleet.rank == 0:
        try:
            path, payload = _newest(path, missing_ok)
        except CheckpointError as error:
            trouble = str(error).encode()
    _raise_together(run, trouble, "rank 0 to find a checkpoint")
    payload = run.fleet.broadcast_bytes(payload, "rank 0's checkpoint")
    return (path, checkpoint.parse(payload)) if payload else None


def _newest(path: Path, missing_ok: bool) -> tuple[Path, bytes]:
    """Without a payload if there is none and may be."""
    if missing_ok and not _holds_one(path):
        return path, b""
    return checkpoint.load_newest(path)


def _holds_one(path: Path) -> bool:
    """Whether there is a checkpoint: in a worker's own folder there may be its records alone."""
    return path.exists() and any(checkpoint.find(path))


def take(run: Run) -> dict[str, Any]:
    """The state of the run; the random states of all workers are gathered where they meet, so all must call this."""
    # Where workers train apart, each has a loss scale of its own.
    own = {**_random_state(), "scaler": None if run.scaler is None else run.scaler.state_dict()}
    random_states = [_pack(own)]
    if not isinstance(run.sync, Unmet):
        random_states = run.fleet.gather(random_states[0], "the random states of all workers for a checkpoint")
    return {
        "workers": run.fleet.size,
        "identity": identity(run),
        "cursor": msgspec.to_builtins(run.cursor),
        "lengths": run.lengths,
        "model": run.replica.module.state_dict(),
        "trained": run.replica.places(map(id, run.replica.parameters)),
        "extra_parameters": {name: p.detach() for name, p in run.replica.extra},
        "optimizer_kind": type(run.optimizer).__name__,
        "optimizer": run.optimizer.state_dict(),
        "scaler": None if run.scaler is None else run.scaler.state_dict(),
        "roles": {name: _role_state(role) for name, role in run.roles().items()},
        "stateful": {name: one.state_dict() for name, one in run.stateful.items()},
        "random_states": random_states,
    }


def restore(run: Run, tree: Mapping[str, Any]) -> Cursor:
    """Put a state back into a run; gives the cursor. Nothing is changed if the state does not fit."""
    cursor = msgspec.convert(tree["cursor"], Cursor)
    _check(run, tree, cursor)
    try:
        run.replica.load(tree["model"])
        run.optimizer.load_state_dict(tree["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the checkpoint is of another model or optimizer: {error}") from error
    with torch.no_grad():
        for name, parameter in run.replica.extra:
            parameter.copy_(tree["extra_parameters"][name])
    run.sync.reload()
    if run.scaler is not None and tree["scaler"] is not None:
        run.scaler.load_state_dict(tree["scaler"])
    for name, role in run.roles().items():
        if isinstance(role, Stateful) and tree["roles"][name]["kind"] == _kind(role):
            role.load_state_dict(tree["roles"][name]["state"])
    for name, one in run.stateful.items():
        one.load_state_dict(tree["stateful"][name])
    own, alone = tree["own_states"], "worker" in tree
    rank = 0 if alone else run.fleet.rank  # who is alone in the file is the first there
    fits = isinstance(run.sync, Unmet) if alone else len(own) == run.fleet.size and not isinstance(run.sync, Unmet)
    if fits and own[rank] and tree["roles"]["sync"]["kind"] == _kind(run.sync):
        run.sync.load_own_state(_unpack(own[rank]))
    if rank < len(tree["random_states"]):  # a worker more than there were keeps the random state that it has
        state = _unpack(tree["random_states"][rank])
        _set_random_state(state)
        if run.scaler is not None and state["scaler"] is not None:
            run.scaler.load_state_dict(state["scaler"])
    return cursor


def resumed(run: Run, found: bool) -> bool:
    """Whether the run goes on from something: where each has a checkpoint of its own, maybe from another worker's."""
    return run.sync.resumed(run.cursor.progress if found else None) if isinstance(run.sync, Unmet) else found


def _raise_together(run: Run, trouble: bytes, what: str) -> None:
    """Rank 0's trouble with a file is everybody's: otherwise the others would go on alone."""
    if trouble := run.fleet.broadcast_bytes(trouble, what):
        raise CheckpointError(trouble.decode())


def _check(run: Run, tree: Mapping[str, Any], cursor: Cursor) -> None:
    if len(cursor.taken) != len(run.lengths) or (len(cursor.taken) > 1 and tuple(tree["lengths"]) != run.lengths):
        raise CheckpointError(
            f"the checkpoint is of {tree['workers']} workers and data sets of {list(tree['lengths'])} examples, but "
            f"{run.fleet.size} workers with {list(run.lengths)} resume it; where workers have data of their own, "
            "number and lengths must be the same"
        )
    mine = identity(run)
    keys = ["model"]
    # In the middle of an epoch the rest of it must be the same examples, and what is learnt of examples is of the same.
    if any(cursor.taken) or isinstance(run.order, Learner):
        keys += ["dataset length", "order", "seed"]
    for key in keys:
        if tree["identity"].get(key) != mine.get(key):
            raise CheckpointError(
                f"the {key} of the checkpoint is {tree['identity'].get(key)}, but the run's is {mine.get(key)}; "
                "resume with the same, or start a new run"
            )
    for name, role in run.roles().items():
        saved = tree["roles"][name]
        # What leaves nothing behind may be followed by anything, which then begins as in a new run.
        left = saved["state"] and not saved.get("replaceable", False)
        if saved["kind"] != _kind(role) and isinstance(role, Stateful) and left:
            raise CheckpointError(
                f"the checkpoint was made with {name}={saved['kind']}, whose state means nothing to {_kind(role)}; "
                f"resume with the same {name}, or begin a new run with the checkpoint's model"
            )
    trained = run.replica.places(map(id, run.replica.parameters))
    if getattr(run.sync, "counts_changes", False) and tree["trained"] != trained:
        raise CheckpointError(
            f"{len(tree['trained'])} parameters were trained when the checkpoint was made, and {len(trained)}, or "
            f"others, are now; {run.sync!r} counts the change of each of them since then: resume with the same, or "
            "begin a new run with the checkpoint's model"
        )
    groups = [len(group["params"]) for group in run.optimizer.param_groups]
    saved = [len(group["params"]) for group in tree["optimizer"]["param_groups"]]
    if tree["optimizer_kind"] != type(run.optimizer).__name__ or groups != saved:
        raise CheckpointError(
            f"the optimizer of the checkpoint is {tree['optimizer_kind']} with {saved} parameters in its groups, but "
            f"the run's is {type(run.optimizer).__name__} with {groups}; resume with the same"
        )
    missing = sorted(set(run.stateful) ^ set(tree["stateful"]))
    if missing:
        raise CheckpointError(
            f"the objects in `stateful` are not those of the checkpoint: {', '.join(missing)} is only in one of them"
        )
    if (run.scaler is None) != (tree["scaler"] is None):
        raise CheckpointError("the checkpoint was made with a GradScaler and the run has none, or the other way round")


def _role_state(role: object) -> dict[str, Any]:
    state = role.state_dict() if isinstance(role, Stateful) else {}
    return {"kind": _kind(role), "state": state, "replaceable": bool(getattr(role, "replaceable", False))}


def _kind(role: object) -> str:
    """Who can take a role's state over: the same class, unless the role has a narrower ``kind``."""
    return str(getattr(role, "kind", type(role).__name__))


def _random_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))


def _pack(state: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


def _unpack(blob: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(blob), weights_only=True)
    return state
