"""When, what and with whom to average."""

from paceline.sync.all_reduce import AllReduce
from paceline.sync.every import Examples, PostLocal, Ramp, Seconds, Steps
from paceline.sync.gossip import Gossip
from paceline.sync.hierarchical import Hierarchical
from paceline.sync.local_sgd import LocalSGD
from paceline.sync.neighbours import Neighbours
from paceline.sync.optimizer_state import Average, Keep, Reset
from paceline.sync.outer import DiLoCo, SlowMo
from paceline.sync.own_rounds import Geometric, WhileNear
from paceline.sync.statistics import Measuring

__all__ = [
    "AllReduce",
    "Average",
    "DiLoCo",
    "Examples",
    "Geometric",
    "Gossip",
    "Hierarchical",
    "Keep",
    "LocalSGD",
    "Measuring",
    "Neighbours",
    "PostLocal",
    "Ramp",
    "Reset",
    "Seconds",
    "SlowMo",
    "Steps",
    "WhileNear",
]
