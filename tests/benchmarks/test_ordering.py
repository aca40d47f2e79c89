"""The benchmark of orders: its bound is that of the package, and its summary says what it should."""

from __future__ import annotations

import torch

from benchmarks.ordering import METHODS, Seen, herding, summary, train
from paceline.order import herding_bound


def test_the_bound_is_that_of_all_gradients_at_once() -> None:
    torch.manual_seed(0)
    x, errors = torch.randn(300, 5), torch.randn(300, 3)
    orders = torch.randperm(300).view(3, 100)  # more than one piece
    vectors = Seen(x, errors).gradients()[orders]
    assert abs(herding(x, errors, orders) - herding_bound(vectors)) < 1e-4  # one sums in single precision


def test_simulated_streams_learn_with_every_method() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 5), torch.randint(3, (64,))
    options = {"streams": 4, "rate": 0.1, "epochs": 3}
    found = {name: train(name, options, 0, x, y)["losses"] for name in METHODS}
    assert all(losses[-1] < losses[0] < 1.2 for losses in found.values())
    assert len({tuple(losses) for losses in found.values()}) >= 5  # orders differ
    first = {losses[0] for name, losses in found.items() if "GraB" in name}
    assert len(first) == 1  # nothing is known in the first epoch


def test_who_reaches_the_goal_and_when() -> None:
    rows = summary({"shuffling": [[3.0, 1.0, 2.0]], "learnt": [[1.5, 0.5, 0.25]], "worse": [[4.0, 3.0, 2.0]]})
    assert [rows[name]["reached"] for name in rows] == [[2], [2], [None]]
    assert rows["learnt"]["best"] == [0.25]
