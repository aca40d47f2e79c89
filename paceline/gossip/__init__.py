"""Pairs of workers that average their models, without a fleet: who may meet whom, and what one exchange is."""

from paceline.gossip.graph import Complete, Edges, Exponential, FromFile, Graph, RandomRegular, Ring, Torus, contraction

__all__ = [
    "Complete",
    "Edges",
    "Exponential",
    "FromFile",
    "Graph",
    "RandomRegular",
    "Ring",
    "Torus",
    "contraction",
]
