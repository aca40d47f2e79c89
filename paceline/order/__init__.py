"""Which examples come next."""

from paceline.order.balancing import MeanBalancer, PairBalancer
from paceline.order.learnt import GraB, PairBalance
from paceline.order.reversed import FlipFlop, ShuffleBlocks
from paceline.order.sampler import BalancedSampler
from paceline.order.shuffle import Sequential, Shuffle, ShuffleOnce
from paceline.order.signs import Greedy, Halving, Walk, herding_bound
from paceline.order.streams import OneStream, WorkerStreams

__all__ = [
    "BalancedSampler",
    "FlipFlop",
    "GraB",
    "Greedy",
    "Halving",
    "MeanBalancer",
    "OneStream",
    "PairBalance",
    "PairBalancer",
    "Sequential",
    "Shuffle",
    "ShuffleBlocks",
    "ShuffleOnce",
    "Walk",
    "WorkerStreams",
    "herding_bound",
]
