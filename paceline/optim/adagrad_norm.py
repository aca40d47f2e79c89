"""AdaGrad with one number for all coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import SettingError

__all__ = ["AdaGradNorm"]


class AdaGradNorm(Optimizer):
    """AdaGrad-Norm (Ward, Wu and Bottou 2019): one step size for all coordinates of a parameter group.

    ``s_t = s_(t-1) + |g_t|^2`` and ``x_(t+1) = x_t - lr / (sqrt(s_t) + eps) g_t``, where the norm is over the whole
    group. Weight decay is added to the gradient, as in torch's Adagrad.

    Args:
        params: as for every torch optimizer.
        lr: the learning rate.
        initial: s_0. A large one is a slow start; with 0 the first step has length ``lr``.
        eps: against a division by zero.
        weight_decay: of L2 regularisation.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-2,
        *,
        initial: float = 0.0,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value in (("lr", lr), ("initial", initial), ("eps", eps), ("weight_decay", weight_decay)):
            if not (0 <= value < math.inf):
                raise SettingError(f"AdaGradNorm: {name} ({value}) must be a finite number of at least 0")
        super().__init__(params, {"lr": lr, "initial": initial, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more group; its parameters must be real."""
        super().add_param_group(param_group)
        if any(parameter.is_complex() for parameter in self.param_groups[-1]["params"]):
            del self.param_groups[-1]
            raise SettingError("AdaGradNorm takes real parameters only; view complex ones as real")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; gives the loss of the closure, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                self._step(group, trained, [parameter.grad for parameter in trained])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state back; sums keep their precision, whatever that of the parameters."""
        super().load_state_dict(state_dict)
        order = [parameter for group in self.param_groups for parameter in group["params"]]
        for at, state in state_dict["state"].items():
            parameter = order[at]
            self.state[parameter]["sum"] = state["sum"].to(parameter.device, copy=True)

    def _step(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        for gradient in gradients:
            if gradient.is_sparse:
                raise SettingError("AdaGradNorm has no step for sparse gradients; build the layer with sparse=False")
        if group["weight_decay"]:
            gradients = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])  # type: ignore[assignment]
        first = group["params"][0]
        state = self.state[first]
        if "sum" not in state:
            # A sum over a whole training: in single precision small terms would be lost in it.
            state["sum"] = torch.full((), float(group["initial"]), dtype=torch.float64, device=first.device)
        norms = torch._foreach_norm(gradients)
        state["sum"] += torch.stack([norm.to(first.device, torch.float64) for norm in norms]).square().sum()
        rate = float(group["lr"]) / (state["sum"].sqrt() + group["eps"])
        scaled = (
            torch._foreach_mul(gradients, rate.to(gradients[0].dtype))
            if _alike(gradients)
            else [gradient * rate.to(gradient.device, gradient.dtype) for gradient in gradients]
        )
        torch._foreach_sub_(parameters, scaled)


def _alike(tensors: list[Tensor]) -> bool:
    return len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1
