"""A model must be where the workers exchange tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.replica import Replica


def test_a_model_on_the_cpu_among_gpus_is_refused() -> None:
    model = nn.Linear(2, 2)
    fleet: Any = SimpleNamespace(size=2, rank=0, device=torch.device("cuda", 0))
    with pytest.raises(pl.SettingError, match=r"move it to this worker's GPU .*init_process_group\('gloo'\)"):
        Replica(model, torch.optim.SGD(model.parameters(), lr=0.1)).equalise(fleet)
