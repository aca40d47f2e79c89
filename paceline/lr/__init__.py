"""How the learning rate follows the batch."""

from paceline.lr.constant import Constant

__all__ = ["Constant"]
