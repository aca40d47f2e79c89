"""What every forked worker needs; importing it takes seconds, forking after it milliseconds."""

import torch
import torch._dynamo  # the first optimizer of a process imports it, in a second and a half
import torch.distributed
import torch.nn.parallel

import paceline
import tests.problems

__all__ = ["paceline", "tests", "torch"]
