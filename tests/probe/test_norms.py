from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.probe import norms
from paceline.probe.norms import PIECE, inner_products, norm, portions, sqnorm

from .models import Allocations

shapes = st.lists(st.sampled_from([(), (1,), (0,), (3,), (2, 3), (4, 2, 2), (7, 5), (2, 3, 2, 2), (31,)]), max_size=9)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_portions_hold_all_numbers_in_order(
    shapes: list[tuple[int, ...]], limit: int, first: int, transposed: bool
) -> None:
    total = sum(math.prod(shape) for shape in shapes)
    numbers = torch.split(torch.arange(total), [math.prod(shape) for shape in shapes]) if shapes else ()
    tensors = [flat.view(shape) for flat, shape in zip(numbers, shapes, strict=True)]
    if transposed:  # the same numbers in another layout of the memory
        tensors = [t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t for t in tensors]
    found = [torch.cat([p.reshape(-1) for p in pieces]) for pieces in portions(tensors, limit, first)]
    found = [portion for portion in found if len(portion)]
    assert torch.cat([*found, torch.arange(0)]).tolist() == list(range(total))
    lengths = [len(portion) for portion in found]
    assert lengths[:-1] == [first, *[limit] * (len(lengths) - 2)][: len(lengths) - 1]


def test_long_vectors_lose_no_digits() -> None:
    # A plain single-precision norm of this vector is off by 1e-3 on the CPU.
    long = torch.full((4_000_000,), 1.1)
    exact = float(long.double().norm())
    assert float(norm([long[:11], long[11:]])) == pytest.approx(exact, rel=2e-5)
    assert sqnorm([long[:11], long[11:]]) == pytest.approx(exact * exact, rel=4e-5)
    assert sqnorm([long[:11], long[11:]], double=True) == pytest.approx(exact * exact, rel=1e-10)
    gram = inner_products(torch.stack([long, -long]))
    assert gram[0, 1].item() == pytest.approx(-exact * exact, rel=4e-5)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("length", [1, 255, 256, 70_001])
def test_double_sums_are_those_of_exact_squares(length: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "FUSED_FROM", 1)
    monkeypatch.setattr(norms, "has_numba", lambda: compiled)
    vector = torch.randn(length, generator=torch.Generator().manual_seed(length))
    vector[0] = 1e19  # whose square is infinite in single precision
    exact = math.fsum(number * number for number in vector.tolist())
    assert sqnorm([vector], double=True) == pytest.approx(exact, rel=1e-13)
    vector[-1] = math.nan
    assert math.isnan(sqnorm([vector], double=True))


def test_layouts_types_and_shapes() -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(40, 30, 3, 3, generator=generator).to(memory_format=torch.channels_last)
    scalar = torch.tensor(2.0)
    expected = math.hypot(float(image.double().norm()), 2.0)
    assert float(norm([image, scalar, torch.zeros(0)])) == pytest.approx(expected, rel=1e-6)
    assert sqnorm([image, scalar, torch.zeros(0)]) == pytest.approx(expected * expected, rel=1e-6)
    assert float(norm([])) == sqnorm([]) == 0.0
    assert norm([torch.ones(2, dtype=torch.float64), torch.ones(2)]).dtype == torch.float64
    # In half precision itself the norm of these numbers would be infinite.
    many = torch.full((10_000,), 1000.0, dtype=torch.float16)
    assert float(norm([many])) == pytest.approx(1e5, rel=1e-5)
    assert sqnorm([many]) == pytest.approx(1e10, rel=1e-5)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows(bad: float) -> None:
    numbers = [torch.ones(5), torch.tensor([1.0, bad])]
    assert not math.isfinite(float(norm(numbers)))
    assert not math.isfinite(sqnorm(numbers))


@pytest.mark.parametrize("function", [norm, sqnorm, partial(sqnorm, double=True)])
def test_temporaries_are_short(function: Callable[[Iterable[torch.Tensor]], object]) -> None:
    tensors = [
        torch.ones(300, 100, 3, 3).to(memory_format=torch.channels_last),
        torch.ones(500_000),
        torch.ones(2, 3, PIECE).transpose(0, 2),
    ]
    with Allocations() as seen:
        function(tensors)
    assert 0 < seen.largest <= 8 * PIECE
