"""Optimizers that torch lacks."""

from paceline.optim.adagrad_norm import AdaGradNorm

__all__ = ["AdaGradNorm"]
