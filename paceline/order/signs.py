"""Vector balancing: a sign for each of many vectors, so that all their partial sums stay small.

All rules decide from two numbers, the inner product of a vector z with the running sum s of those before it, each with
its sign, and the vector's squared norm. So signs of many vectors follow from their Gram matrix alone.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from paceline.errors import SettingError

__all__ = [
    "Greedy",
    "Halving",
    "Rule",
    "Walk",
    "gram_signs",
    "greedy_sign",
    "grid_of",
    "halving_threshold",
    "herding_bound",
    "walk_probability",
]

# Sums of hundreds of products of numbers with so many bits have room in the 53 of a double: they are exact in whatever
# order a processor adds them up, so that workers with different processors come to the same signs.
BITS = 14


class Rule(Protocol):
    """Chooses signs, one after the other."""

    def begin(self) -> None:
        """An epoch begins: the running sum is zero again."""

    def sign(self, product: float, sqnorm: float) -> int:
        """1 or -1 for a vector z, by <s, z> and |z|²."""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""


def greedy_sign(product: float) -> int:
    """What makes |s + sign z| smaller; 1 if both are as good."""
    return 1 if product <= 0 else -1


def walk_probability(product: float, largest_sqnorm: float, limit: float) -> float:
    """That of sign 1 in the self-balancing walk (Alweiss, Liu, Sawhney 2021): 1/2 - <s, z> / (2 c).

    The paper's vectors have norms of at most 1: so <s, z> counts in units of the ``largest_sqnorm`` among them.
    ``limit`` is its c; beyond it the sign is certain.
    """
    if not largest_sqnorm:
        return 0.5
    return min(1.0, max(0.0, 0.5 - product / largest_sqnorm / (2 * limit)))


def halving_threshold(spread: float, sqnorm: float, log_term: float) -> tuple[float, float]:
    """The threshold a of kernel halving with a linear kernel (Carrell et al. 2025), and its next state.

    ``spread`` is 2 sigma², 0 at first, ``sqnorm`` b² = |z|², ``log_term`` L. With r² = spread L / b²: a = max(1, r) b²;
    while r is at most 1, spread becomes 2 b², else it grows by 2 b² max(0, L + 1/2 - r) / L. The sign is 1 with
    probability 1/2 - <s, z> / (2 a).
    """
    if not sqnorm:
        return 0.0, spread
    ratio = math.sqrt(spread * log_term / sqnorm)
    if ratio <= 1:
        return sqnorm, 2 * sqnorm
    return ratio * sqnorm, spread + 2 * sqnorm * max(0.0, log_term + 0.5 - ratio) / log_term


@dataclass
class Greedy:
    """The sign that keeps the sum smaller. No guarantee for every input, and what works best in practice."""

    def begin(self) -> None:
        """Nothing to forget."""

    def sign(self, product: float, sqnorm: float) -> int:
        """By :func:`greedy_sign`."""
        return greedy_sign(product)

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


@dataclass
class Walk:
    """The self-balancing walk: a random sign, the more certain the more one of them helps.

    Args:
        limit: the paper's c, for vectors scaled to norms of at most 1. Its proof takes 30 log(n d / delta); with less,
            signs are more certain.
        seed: of the random numbers.
    """

    limit: float = 30.0
    seed: int = 0
    _largest: float = field(init=False, repr=False, default=0.0)
    _random: random.Random = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise SettingError(
                f"Walk: limit ({self.limit}) must be positive; 30 is that of the paper's proof, but for logs"
            )
        self._random = random.Random(self.seed)

    def begin(self) -> None:
        """The norms of the epoch before are a good guess for this one."""

    def sign(self, product: float, sqnorm: float) -> int:
        """By :func:`walk_probability`."""
        self._largest = max(self._largest, sqnorm)
        return 1 if self._random.random() < walk_probability(product, self._largest, self.limit) else -1

    def state_dict(self) -> dict[str, Any]:
        """The largest norm so far, and the place in the random numbers."""
        return {"largest": self._largest, "random": _plain(self._random.getstate())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._largest = state["largest"]
        self._random.setstate(_tuples(state["random"]))


@dataclass
class Halving:
    """Kernel halving: a random sign with a threshold that follows the vectors, so that nothing has to be known of them.

    Args:
        pairs: about how many vectors there are in an epoch.
        epochs: in how many epochs.
        delta: with what probability its guarantee may fail.
        seed: of the random numbers.
    """

    pairs: int
    epochs: int
    delta: float = 0.5
    seed: int = 0
    _spread: float = field(init=False, repr=False, default=0.0)
    _index: int = field(init=False, repr=False, default=0)
    _epoch: int = field(init=False, repr=False, default=0)
    _random: random.Random = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.pairs < 1 or self.epochs < 1:
            raise SettingError(f"Halving: pairs ({self.pairs}) and epochs ({self.epochs}) must be at least 1")
        if not 0 < self.delta < 1:
            raise SettingError(f"Halving: delta ({self.delta}) must be above 0 and below 1")
        self._random = random.Random(self.seed)

    def begin(self) -> None:
        """Count from the beginning."""
        self._spread, self._index, self._epoch = 0.0, 0, self._epoch + 1

    def sign(self, product: float, sqnorm: float) -> int:
        """By :func:`halving_threshold`."""
        self._index += 1
        threshold, self._spread = halving_threshold(self._spread, sqnorm, self._log_term())
        return 1 if product <= self._random.uniform(-1, 1) * threshold else -1

    def _log_term(self) -> float:
        """Vector i of an epoch has 1 / (i epoch) of delta, over what these parts add up to: products of logarithms."""
        shares = (1 + math.log(self.epochs)) * self._epoch * (1 + math.log(self.pairs)) * self._index
        return math.log(4 / self.delta * shares)

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        place = {"spread": self._spread, "index": self._index, "epoch": self._epoch}
        return {**place, "random": _plain(self._random.getstate())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take that back."""
        self._spread, self._index, self._epoch = state["spread"], state["index"], state["epoch"]
        self._random.setstate(_tuples(state["random"]))


def gram_signs(products: Tensor, gram: Tensor, rule: Rule) -> list[int]:
    """The signs of vectors z_1, z_2, … by ``rule``, from <s, z_j> at the beginning and <z_i, z_j>.

    The same as one vector after the other: <s, z_j> has grown by the sum over i < j of sign_i <z_i, z_j> by then.
    """
    signs: list[int] = []
    start, table = products.double().tolist(), gram.double().tolist()
    for at, row in enumerate(table):
        product = start[at] + math.fsum(sign * entry for sign, entry in zip(signs, row, strict=False))
        signs.append(rule.sign(product, row[at]))
    return signs


def grid_of(largest: float) -> float:
    """The power of two of which numbers up to ``largest`` are at most 2^14 times; 1 for zero."""
    return math.ldexp(1.0, math.frexp(largest)[1] - BITS) if largest else 1.0


def herding_bound(vectors: Tensor) -> float:
    """``max_t |sum of the first t vectors, each minus the mean of all|``, in the maximum norm: small for a good order.

    ``vectors`` is (T, d), in their order; with several workers (workers, T, d), whose vectors of one step are added up.
    """
    steps = vectors.double() if vectors.dim() == 2 else vectors.double().sum(0)
    return float((steps - steps.mean(0)).cumsum(0).abs().max()) if len(steps) else 0.0


def _plain(state: Any) -> Any:
    """Lists in the place of tuples, as checkpoints give them back."""
    return [_plain(each) for each in state] if isinstance(state, tuple) else state


def _tuples(state: Any) -> Any:
    return tuple(_tuples(each) for each in state) if isinstance(state, list | tuple) else state
