"""This worker's copy of the model: which tensors belong to it, and whether it equals the others'."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import SettingError
from paceline.fleet import Fleet

__all__ = ["Replica"]


class Replica:
    """The parameters and buffers that are trained together.

    Parameters are those of the model that require a gradient, then those that only the optimizer knows (of a learnt
    loss, say).
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        _check_kinds(model, optimizer)
        self.optimizer = optimizer
        self.learning_rate = float(optimizer.param_groups[0].get("lr", 0.0))
        """That of the first parameter group in the last step, with the rule's factor, whatever that multiplies."""
        self.ddp = model if isinstance(model, DistributedDataParallel) else None
        self.module: nn.Module = self.ddp.module if self.ddp else model
        named = {id(p): (name, p) for name, p in self.module.named_parameters()}
        extra = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in named]
        none = len(extra) == sum(len(group["params"]) for group in optimizer.param_groups)
        if none and any(p.requires_grad for _, p in named.values()):
            raise SettingError(
                "the optimizer has no parameter of the model, so that the model would not be trained; make it with "
                "model.parameters(), of the same model"
            )
        if self.ddp and extra:
            raise SettingError(
                f"the optimizer holds {len(extra)} parameters that are not in the DistributedDataParallel module, so "
                "nobody would average their gradients; make them part of the module, or give Run the bare module"
            )
        self._all = [*named.values(), *((f"optimizer.{at}", p) for at, p in enumerate(extra))]
        self.known = frozenset(id(p) for _, p in self._all)
        """The ids of all parameters that belong to it."""
        # Where the buffers are, found once: walking through a large module in every step would be slow.
        self._slots = [
            (f"{path}.{key}".lstrip("."), owner, key)
            for path, owner in self.module.named_modules()
            for key in owner._buffers
        ]
        if any(type(p.data).__name__ == "DTensor" for _, p in self._all):
            raise SettingError(
                "the model's parameters are sharded (DTensor, FSDP); Paceline averages whole models: give Run the bare "
                "module, or one wrapped in DistributedDataParallel"
            )
        if not self.parameters:
            raise SettingError("no parameter of the model requires a gradient, so there is nothing to train")

    @property
    def batch_norm(self) -> str:
        """The name of a layer that takes statistics over the worker's own examples; empty if there is none."""
        for name, layer in self.module.named_modules():
            if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
                return f"{name} ({type(layer).__name__})"
        return ""

    @property
    def synced_norm(self) -> str:
        """The name of a layer that exchanges statistics with all workers in its forward pass; empty without one."""
        for name, layer in self.module.named_modules():
            if isinstance(layer, nn.SyncBatchNorm):
                return f"{name} ({type(layer).__name__})"
        return ""

    @property
    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters, with names."""
        return [(name, p) for name, p in self._all if p.requires_grad]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters; a user may freeze and thaw some between steps."""
        return [p for _, p in self._all if p.requires_grad]

    @property
    def frozen(self) -> list[nn.Parameter]:
        """The parameters that are not trained now."""
        return [p for _, p in self._all if not p.requires_grad]

    def trained(self, also: Container[int]) -> list[nn.Parameter]:
        """The trained parameters, and those with these ids, which were trained a while ago."""
        return [p for _, p in self._all if p.requires_grad or id(p) in also]

    def with_gradient(self) -> nn.Parameter | None:
        """The first that has a gradient."""
        return next((p for _, p in self._all if p.grad is not None), None)

    def places(self, ids: Iterable[int]) -> list[int]:
        """Which of all parameters, trained or not, have these ids: the same numbers on all workers."""
        wanted = set(ids)
        return [at for at, (_, p) in enumerate(self._all) if id(p) in wanted]

    def at(self, places: Iterable[int]) -> list[nn.Parameter]:
        """The parameters at these places."""
        return [self._all[at][1] for at in places]

    @property
    def extra(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that only the optimizer knows, trained or not."""
        return [(name, p) for name, p in self._all if name.startswith("optimizer.")]

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self.parameters[0].device

    @property
    def buffered(self) -> bool:
        """Whether it may have buffers: the same on all workers."""
        return bool(self._slots)

    def buffers(self) -> list[tuple[str, Tensor]]:
        """The buffers, with names."""
        return [(name, buffer) for name, owner, key in self._slots if (buffer := owner._buffers[key]) is not None]

    def counters(self) -> dict[str, Tensor]:
        """The buffers that are not floating point, by name."""
        return {name: buffer for name, buffer in self.buffers() if not buffer.is_floating_point()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take a state of the module; buffers that have another shape there (caches) are made anew."""
        for name, owner, key in self._slots:
            own, saved = owner._buffers[key], state.get(name)
            if own is not None and isinstance(saved, Tensor) and saved.shape != own.shape:
                owner._buffers[key] = own.new_empty(saved.shape)
        self.module.load_state_dict(state)

    def load_counters(self, values: Sequence[Tensor]) -> None:
        """Take the values of the buffers that are not floating point, also of those that are in no state dict."""
        slots = [(owner, key, own) for _, owner, key in self._slots if (own := owner._buffers[key]) is not None]
        counters = [(owner, key, own) for owner, key, own in slots if not own.is_floating_point()]
        for (owner, key, own), value in zip(counters, values, strict=True):
            if own.shape == value.shape:
                own.copy_(value)
            else:
                owner._buffers[key] = value.to(own.device, copy=True)

    def shape(self) -> str:
        """A digest of names, shapes and kinds of all tensors: equal on all workers, or they train different models.

        Shapes of buffers do not count: those of caches change.
        """
        forms = [f"{name}:{tuple(t.shape)}:{t.dtype}" for name, t in self._all]
        text = ";".join([*forms, *(f"{name}:{t.dtype}" for name, t in self.buffers())])
        numbers = sum(p.numel() for _, p in self._all)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"{numbers:,} parameters in {len(self._all)} tensors, digest {digest}"

    def digest(self) -> str:
        """A digest of all values, to the bit."""
        total = hashlib.sha256()
        for _, tensor in [*self._all, *self.buffers()]:
            total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return total.hexdigest()

    def equalise(self, fleet: Fleet) -> None:
        """Make all workers start from rank 0's values; warn if they did not."""
        if fleet.size == 1:
            return
        if fleet.device.type == "cuda" and self.device.type == "cpu":
            raise SettingError(
                "the model is on the CPU, but the workers exchange tensors between GPUs (NCCL); move it to this "
                "worker's GPU before Run(…), or begin with torch.distributed.init_process_group('gloo') for CPUs"
            )
        digests = fleet.gather(self.digest().encode(), "the digest of the initial parameters")
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if not different:
            return
        with torch.no_grad():
            for name, tensor in [*self._all, *self.buffers()]:
                same = tensor.detach().contiguous().to(fleet.device)
                fleet.broadcast(same, f"rank 0's initial value of {name}")
                tensor.copy_(same)
        if fleet.rank == 0:
            warnings.warn(
                f"the initial parameters or buffers of ranks {', '.join(map(str, different))} differed from rank 0's; "
                "all workers now have rank 0's. Seed all workers alike (torch.manual_seed) before building the model.",
                stacklevel=2,
            )


def _check_kinds(model: object, optimizer: object) -> None:
    if not isinstance(model, nn.Module):
        raise SettingError(f"model is a {type(model).__name__}, not a torch.nn.Module; write Run(model, optimizer, …)")
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise SettingError(f"optimizer is the class {name}; write Run(model, {name}(model.parameters(), …), …)")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingError(f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SettingError("LBFGS needs a closure, whose gradients nobody would average; use another optimizer")
