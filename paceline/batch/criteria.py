"""The statistical tests of adaptive batches, as the batch that each of them asks for.

All compare the noise of an averaged gradient gbar with its length. For a batch of b examples with gradients g_i::

    norm test            Var(g_i) / b             <= eta^2   |gbar|^2    (Byrd et al. 2012)
    inner-product test   Var(<g_i, gbar>) / b     <= theta^2 |gbar|^4    (Bollapragada, Byrd and Nocedal 2018)
    orthogonality test   Var(g_i - its part along gbar) / b <= nu^2 |gbar|^2
    augmented test       the last two together
    coordinate test      the norm test for every coordinate by itself

A test holds exactly if b is at least what the function here gives. Variances are of one example's gradient, summed
over coordinates, with ddof 1: from groups of examples they come out of :mod:`paceline.probe.stats`, unbiased for any
grouping.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "augmented_batch",
    "coordinate_batch",
    "inner_product_batch",
    "next_size",
    "norm_test_batch",
    "orthogonality_batch",
    "tensor_batch",
]


def norm_test_batch(variance: float, sqnorm: float, eta: float, population: float | None = None) -> float:
    """The smallest batch that passes the norm test: variance / (eta^2 sqnorm).

    ``sqnorm`` is |gbar|^2, or the squared norm of the true gradient. For examples that are drawn without replacement
    out of a ``population`` of N, the variance of their mean has the factor (N - b) / (N - 1), which no batch above N
    can be asked for::

        variance / b (N - b) / (N - 1) = eta^2 sqnorm   <=>   b = N variance / ((N - 1) eta^2 sqnorm + variance)
    """
    if variance <= 0:
        return 0.0
    allowed = eta * eta * sqnorm
    if population is not None and population > 1:
        return population * variance / ((population - 1) * max(allowed, 0.0) + variance)
    return variance / allowed if allowed > 0 else math.inf


def inner_product_batch(along: float, sqnorm: float, theta: float, population: float | None = None) -> float:
    """The smallest batch that passes the inner-product test: Var(<g_i, gbar>) / (theta^2 |gbar|^4).

    ``along`` is the variance of the gradient along gbar, Var(<g_i, gbar>) / |gbar|^2.
    """
    return norm_test_batch(along, sqnorm, theta, population)


def orthogonality_batch(
    variance: float, along: float, sqnorm: float, nu: float, population: float | None = None
) -> float:
    """The smallest batch that passes the orthogonality test: what of the variance is not along gbar counts."""
    return norm_test_batch(variance - along, sqnorm, nu, population)


def augmented_batch(
    variance: float, along: float, sqnorm: float, theta: float, nu: float, population: float | None = None
) -> float:
    """The smallest batch that passes the inner-product and the orthogonality test.

    By Pythagoras, one that passes both passes the norm test with eta^2 = theta^2 + nu^2.
    """
    return max(
        inner_product_batch(along, sqnorm, theta, population),
        orthogonality_batch(variance, along, sqnorm, nu, population),
    )


def coordinate_batch(variances: Tensor, mean: Tensor, eta: float, quantile: float = 1.0) -> float:
    """The smallest batch that passes the norm test in a part ``quantile`` of all coordinates; 1 means in every one.

    ``variances`` are those of the coordinates of one example's gradient and ``mean`` is gbar. In theory it must hold
    in every coordinate; in practice some coordinate always has a mean near zero, and no batch is large enough.
    """
    asked = variances / (eta * mean).square()
    asked[variances <= 0] = 0.0  # also where nothing is known: zero over zero
    return _quantile(asked, torch.ones_like(asked), quantile)


def tensor_batch(variances: Tensor, sqnorms: Tensor, sizes: Tensor, eta: float, quantile: float = 1.0) -> float:
    """The smallest batch that passes the norm test in tensors that have a part ``quantile`` of all coordinates.

    For each tensor, ``variances`` and ``sqnorms`` are sums over its coordinates, and ``sizes`` is their number.
    """
    asked = torch.tensor(
        [
            norm_test_batch(variance, sqnorm, eta)
            for variance, sqnorm in zip(variances.tolist(), sqnorms.tolist(), strict=True)
        ]
    )
    return _quantile(asked, sizes.to(asked), quantile)


def next_size(
    size: int, asked: float, *, smallest: int, limit: int, growth: float, shrink: float | None, multiple: int
) -> int:
    """The batch after a test that asks for ``asked`` examples.

    It grows to what is asked for, at most by the factor ``growth``. It shrinks only if less than ``shrink`` times the
    present size is asked for, at most by the same factor: what lies in between changes nothing, so that noise does not
    make it swing. Sizes are rounded up to a ``multiple``, but not beyond the ``limit`` or that factor, and are not
    below ``smallest``.
    """
    if asked > size:
        most = min(size * growth, float(limit)) // multiple * multiple
        return max(int(min(math.ceil(min(asked, most) / multiple) * multiple, most)), size)
    if shrink is not None and asked < shrink * size:
        return max(min(math.ceil(max(asked, size / growth) / multiple) * multiple, size), smallest)
    return size


def _quantile(values: Tensor, weights: Tensor, part: float) -> float:
    """The smallest value that values of at least this part of the weight do not exceed."""
    order = values.argsort()
    reached = weights[order].double().cumsum(0)
    at = torch.searchsorted(reached, part * float(reached[-1]) * (1 - 1e-12))
    return float(values[order[min(int(at), len(order) - 1)]])
