"""D-PSGD: what it is equal to, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import paceline as pl
from paceline import gossip, sync
from paceline.sync.neighbours import metropolis
from tests.pool import Pool, RemoteError
from tests.problems import data, flat, mlp, train

STEPS = 12
GRAPHS: list[gossip.Graph] = [gossip.Ring(), gossip.Complete(), gossip.Edges(((0, 1), (1, 2), (1, 3)))]


@pytest.mark.parametrize("graph", GRAPHS, ids=["ring", "complete", "star"])
def test_weights_keep_the_mean(graph: gossip.Graph) -> None:
    weights = metropolis(graph.neighbours(range(4)))
    matrix = torch.tensor([[weights[i].get(j, 0.0) for j in range(4)] for i in range(4)], dtype=torch.float64)
    torch.testing.assert_close(matrix, matrix.T)
    torch.testing.assert_close(matrix.sum(0), torch.ones(4, dtype=torch.float64))
    assert float(matrix.min()) >= 0
    values = torch.linalg.eigvalsh(matrix)
    assert float(values[-2]) < 1 - 1e-9  # all come to the same


def make(role: Any) -> pl.Run:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return pl.Run(model, optimizer, data(80), batch=8, sync=role, deadline=30.0)


def trained(role: Any, save: Path | None = None, resume: Path | None = None) -> tuple[list[Tensor], Tensor, str]:
    """The models after every step, the average after the fifth, and the digest at the end."""
    models, middle = list[Tensor](), torch.empty(0)
    with make(role) as run:
        if resume is not None:
            assert run.resume(resume)

        def each(step: pl.Step) -> None:
            nonlocal middle
            models.append(flat(run.model))
            if step.index == 4:
                with run.consensus():
                    middle = flat(run.model)
                assert torch.equal(flat(run.model), models[-1])
                if save is not None:
                    run.save(save)

        train(run, run.model, each=each, steps=STEPS)
        return models, middle, run.replica.digest()


def simulated(graph: gossip.Graph, workers: int) -> Tensor:
    """The same in one process: (steps, workers, parameters)."""
    weights = metropolis(graph.neighbours(range(workers)))
    models = [mlp() for _ in range(workers)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    order = torch.cat([pl.order.Shuffle().permutation(80, epoch, 0) for epoch in range(2)])
    (x, y), each, found = data(80).tensors, 8 // workers, []
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mine = order[8 * step + each * rank : 8 * step + each * (rank + 1)]
            optimizer.zero_grad()
            F.cross_entropy(model(x[mine]), y[mine]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        before = [flat(model) for model in models]
        for rank, model in enumerate(models):
            mixed = torch.stack([weight * before[other] for other, weight in weights[rank].items()]).sum(0)
            torch.nn.utils.vector_to_parameters(mixed, model.parameters())
        found.append(torch.stack([flat(model) for model in models]))
    return torch.stack(found)


@pytest.mark.parametrize("graph", GRAPHS, ids=["ring", "complete", "star"])
def test_every_step_mixes_neighbours(pool: Pool, graph: gossip.Graph) -> None:
    found = pool.run(4, trained, sync.Neighbours(graph))
    expected = simulated(graph, 4)
    ours = torch.stack([torch.stack(models) for models, _, _ in found], dim=1)
    torch.testing.assert_close(ours[:-1], expected[:-1], rtol=0, atol=1e-5)
    mean = expected[-1].mean(0)  # at the end all have the average
    torch.testing.assert_close(ours[-1], mean.expand(4, -1), rtol=0, atol=1e-5)
    for _, middle, digest in found:
        torch.testing.assert_close(middle, expected[4].mean(0), rtol=0, atol=1e-5)
        assert digest == found[0][2]


def test_resume_equals_never_stopped(pool: Pool, tmp_path: Path) -> None:
    """The workers' models differ at every moment, so that all are in the checkpoint."""
    role = sync.Neighbours(gossip.Ring())
    expected = pool.run(3, trained, role, tmp_path / "at.ckpt")
    found = pool.run(3, trained, role, None, tmp_path / "at.ckpt")
    for (ours, _, digest), (theirs, _, same) in zip(found, expected, strict=True):
        assert torch.equal(torch.stack(ours), torch.stack(theirs[5:]))
        assert digest == same


def refused() -> None:
    make(sync.Neighbours(gossip.Edges(((0, 1), (2, 3)))))


def test_what_is_refused(pool: Pool) -> None:
    with pytest.raises(pl.SettingError, match=r"graph \('ring'\) must be a graph"):
        sync.Neighbours("ring")  # type: ignore[arg-type]
    with pytest.raises(pl.SettingError, match="Neighbours needs at least two workers"):
        make(sync.Neighbours())
    for outcome in pool.outcomes(4, refused):
        assert isinstance(outcome, RemoteError)
        assert "does not connect all members" in outcome.text
