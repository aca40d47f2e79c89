"""The losses of one worker's step: what they must be, and what they come to."""

from __future__ import annotations

import math

from torch import Tensor

from paceline.errors import LoopError, NonFiniteLoss

__all__ = ["Losses", "checked_weight", "refuse_what_is_not_finite"]


class Losses:
    """The mean loss of each micro-batch so far, with its weight."""

    def __init__(self) -> None:
        self._found: list[tuple[Tensor, float]] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, loss: Tensor, weight: float) -> None:
        """That of one more."""
        self._found.append((loss.detach(), weight))

    def clear(self) -> None:
        """The step begins again."""
        self._found.clear()

    @property
    def weights(self) -> list[float]:
        """One for each micro-batch."""
        return [weight for _, weight in self._found]

    def sum(self) -> float:
        """All of them, each times its weight; reading them waits for the device, where there is one."""
        return sum(float(loss) * weight for loss, weight in self._found if weight)


def checked_weight(loss: Tensor, weight: float | None, examples: int, where: str) -> float:
    """What the mean loss of so many examples was taken over; one that no gradient can come from is an error."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
        raise LoopError(f"the loss {where} has {shape}; it must be one number: take its mean over the micro-batch")
    if not loss.requires_grad:
        raise LoopError(
            f"the loss {where} does not depend on any parameter that requires a gradient; compute it from the "
            "model's output, outside of torch.no_grad()"
        )
    if weight is None:
        return float(examples)
    if not (math.isfinite(weight) and weight >= 0):
        raise LoopError(f"the weight {weight} of a loss {where} must be a finite number of at least 0")
    return float(weight)


def refuse_what_is_not_finite(losses: dict[int, float], step: int) -> None:
    """The losses of a step, by rank, before anything is learnt from them."""
    bad = [rank for rank, loss in losses.items() if not math.isfinite(loss)]
    if bad:
        told = ", ".join(f"rank {rank}: {losses[rank]}" for rank in bad)
        raise NonFiniteLoss(
            f"the loss in step {step} is not finite ({told}); the parameters were not changed. Lower the "
            "learning rate, clip the gradients, or look for bad examples"
        )
