"""The probe: gradients of units, seen through short linear sketches (or exactly), and their statistics."""

from paceline.probe.probe import Probe
from paceline.probe.sketch import SignSketch
from paceline.probe.stats import (
    between_unit_variance,
    gradient_stats,
    spread_along,
    variance_along,
    variance_from_sums,
    within_workers,
)
from paceline.probe.units import Example, MicroBatch

__all__ = [
    "Example",
    "MicroBatch",
    "Probe",
    "SignSketch",
    "between_unit_variance",
    "gradient_stats",
    "spread_along",
    "variance_along",
    "variance_from_sums",
    "within_workers",
]
