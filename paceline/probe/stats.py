"""Gradient statistics from the norms of unit gradients: the mathematics, without any model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.records import GradientStats, Note

__all__ = [
    "between_unit_variance",
    "gradient_stats",
    "spread_along",
    "variance_along",
    "variance_from_sums",
    "within_workers",
]


def variance_from_sums(units: int, weight: float, weighted_sqnorm: float, mean_sqnorm: float) -> float:
    """Estimate the trace of the covariance of one example's gradient from sums over U units.

    ``sigma2_hat = (sum_i n_i ||g_i||^2 - N ||gbar||^2) / (U - 1)`` with U ``units`` of n_i examples each,
    N = sum n_i (``weight``), ``weighted_sqnorm`` = sum_i n_i ||g_i||^2, and ``mean_sqnorm`` = ||gbar||^2 of the
    weighted mean gbar = sum_i n_i g_i / N. It is the between-group mean square of the analysis of variance
    (numerator: sum_i n_i ||g_i - gbar||^2), because E sum_i n_i ||g_i||^2 = N mu^2 + U sigma^2 and
    E N ||gbar||^2 = N mu^2 + sigma^2: unbiased for every grouping, equal or unequal. With single examples as
    units it is the variance of the norm test of Byrd et al. (2012), with ddof 1.

    NaN with fewer than two units. It is not cut off at zero, which would make it biased.
    """
    if units < 2:
        return math.nan
    return (weighted_sqnorm - weight * mean_sqnorm) / (units - 1)


def between_unit_variance(sizes: Sequence[float], sqnorms: Sequence[float], mean_sqnorm: float) -> float:
    """Estimate sigma^2 from the units themselves: sizes n_i, squared norms ||g_i||^2, and ||gbar||^2.

    The formula is that of :func:`variance_from_sums`.
    """
    weighted_sqnorm = math.fsum(size * sqnorm for size, sqnorm in zip(sizes, sqnorms, strict=True))
    return variance_from_sums(len(sizes), math.fsum(sizes), weighted_sqnorm, mean_sqnorm)


def within_workers(notes: Sequence[Note]) -> float:
    """The variance that matters where workers have data of their own, each with a mean of its own::

        sum_w n_w / N sigma_w^2, with sigma_w^2 = (sum_i n_i ||g_i||^2 - n_w ||g_w||^2) / (U_w - 1) on worker w

    Its units i are compared with its own mean g_w of n_w examples, so that what the data of workers differ in is not
    taken for noise. Divided by N = sum n_w it is, without bias, the variance of the averaged gradient, since each
    worker stands in it for its own data. Workers with one unit, of whose noise nothing is known, are taken to be like
    the others; NaN if there are no others.
    """
    known = [note for note in notes if note.units > 1]
    own = [
        note.measured * variance_from_sums(round(note.units), note.measured, note.unit_sqnorm, note.own_sqnorm)
        for note in known
    ]
    return sum(own) / sum(note.measured for note in known) if known else math.nan


def spread_along(units: int, weight: float, products: float, squares: float) -> float:
    """Var(<g_i, gbar>) from sums over units of n_u <g_u, gbar> (``products``) and of n_u <g_u, gbar>^2 (``squares``)::

    (squares - products^2 / N) / (U - 1)
    """
    return (squares - products * products / weight) / (units - 1) if units > 1 else math.nan


def variance_along(stats: GradientStats, spread: float, blur: float = 0.0) -> float:
    """Of the variance, what is along the mean gradient gbar: ``Var(<g_i, gbar>) / |gbar|^2``, with ``spread`` above.

    A sketch of k numbers is wrong about ``<g_u - gbar, gbar>^2`` by ``|g_u - gbar|^2 |gbar|^2 / k`` on average, so that
    noise of all directions seems to be along gbar: ``blur`` = 1 / k of the variance, which is taken off again.
    """
    if not stats.mean_sqnorm:
        return math.nan
    return (spread / stats.mean_sqnorm - blur * stats.variance) / (1.0 + blur)


def gradient_stats(notes: Sequence[Note], mean_sqnorm: float, within: bool = False) -> GradientStats:
    """Combine the notes of all workers: their units together are one grouping of the step's examples.

    Unless units are to be compared ``within`` each worker only.
    """
    units = round(sum(note.units for note in notes))
    weight = sum(note.weight for note in notes)
    weighted_sqnorm = sum(note.unit_sqnorm for note in notes)
    alike = variance_from_sums(units, weight, weighted_sqnorm, mean_sqnorm)
    variance = within_workers(notes) if within else alike
    return GradientStats(units=units, weight=weight, variance=variance, mean_sqnorm=mean_sqnorm)
