"""How many examples a step takes, all workers together."""

from paceline.batch.coordinate import CoordinateTest
from paceline.batch.each_own import EachOwn
from paceline.batch.fixed import Fixed, Schedule, as_policy
from paceline.batch.growth import GrowthSchedule
from paceline.batch.inner_product import AugmentedTest, InnerProductTest
from paceline.batch.norm_test import NormTest

__all__ = [
    "AugmentedTest",
    "CoordinateTest",
    "EachOwn",
    "Fixed",
    "GrowthSchedule",
    "InnerProductTest",
    "NormTest",
    "Schedule",
    "as_policy",
]
