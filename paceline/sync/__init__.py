"""When, what and with whom to average."""

from paceline.sync.all_reduce import AllReduce

__all__ = ["AllReduce"]
