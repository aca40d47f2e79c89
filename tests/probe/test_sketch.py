from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import SettingError
from paceline.probe import SignSketch
from paceline.probe import sketch as module
from paceline.probe.sketch import SIZE, Whole

from .models import Allocations, tensors_in


@pytest.fixture(autouse=True, scope="module", params=["numba", "torch"])
def computed(request: pytest.FixtureRequest) -> Iterator[str]:
    """What computes it: by default that depends on the length."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FUSED_FROM", 0 if request.param == "numba" else math.inf)
        yield request.param


def folded(vector: Tensor, size: int) -> Tensor:
    """The vector as rows of ``size``, filled up with zeros."""
    return torch.cat([vector, vector.new_zeros(-len(vector) % size)]).view(-1, size)


def matrix_image(sketch: SignSketch, vector: Tensor) -> Tensor:
    """The sketch by its definition: sign s_rc = rows[r] columns[r + c], buckets are columns."""
    table = folded(vector, sketch.size)
    rows, size = table.shape
    signs = [[float(sketch.rows[r] * sketch.columns[r + c]) for c in range(size)] for r in range(rows)]
    return (table * torch.tensor(signs, dtype=table.dtype)).sum(0)


def variance_of_product(a: Tensor, b: Tensor, size: int) -> float:
    """Var <S(a), S(b)> for independent signs: in each bucket the sum over i != j of a_i^2 b_j^2 + a_i b_i a_j b_j."""
    a, b = folded(a.double(), size), folded(b.double(), size)
    pairs = a.square().sum(0) * b.square().sum(0) + (a * b).sum(0).square()
    return float((pairs - 2 * (a * b).square().sum(0)).sum())


def inputs(length: int, seed: int = 0) -> dict[str, Tensor]:
    """Vectors such as gradients are: also with rows that are all but equal."""
    generator = torch.Generator().manual_seed(seed)
    positive = torch.rand(length, generator=generator).add(0.1)
    outer = torch.outer(positive[:97], torch.rand(-(-length // 97), generator=generator)).reshape(-1)[:length]
    return {"random": torch.randn(length, generator=generator), "ones": torch.ones(length), "outer": outer}


@pytest.mark.parametrize("length", [9, 8, 7])
def test_over_all_signs_mean_and_variance_are_those_of_independent_signs(length: int) -> None:
    # Three buckets and three rows take 3 + 5 signs: all 256 choices are tried, so this holds to rounding.
    sketch = SignSketch(length, size=3, dtype=torch.float64)
    assert (len(sketch.rows), len(sketch.columns)) == (3, 5)
    a, b = inputs(length)["random"].double(), inputs(length, seed=1)["outer"].double()
    norms, products = [], []
    for signs in itertools.product([-1.0, 1.0], repeat=8):
        sketch.rows, sketch.columns = torch.split(torch.tensor(signs, dtype=torch.float64), [3, 5])
        image_a, image_b = sketch.of([a], [0]), sketch.of([b], [0])
        norms.append(float(image_a @ image_a))
        products.append(float(image_a @ image_b))
    for found, x, y in ((norms, a, a), (products, a, b)):
        mean = math.fsum(found) / 256
        assert mean == pytest.approx(float(x @ y))
        assert math.fsum((each - mean) ** 2 for each in found) / 256 == pytest.approx(variance_of_product(x, y, 3))


@pytest.mark.parametrize("kind", ["random", "ones", "outer"])
def test_over_seeds_it_is_unbiased_and_its_variance_within_the_bound(kind: str) -> None:
    # 800 seeds: the mean is normal to good approximation (4.5 standard errors: one failure in 10^5), and the
    # sample variance is known to about sqrt(2 / 800) = 5 %, a little more for heavy tails.
    size, length, seeds = 61, 61 * 70 + 5, 800
    a, b = inputs(length)[kind], inputs(length, seed=1)["outer"]
    norms, products = [], []
    for seed in range(seeds):
        sketch = SignSketch(length, size, seed)
        image_a, image_b = sketch.of([a], [0]), sketch.of([b], [0])
        norms.append(image_a @ image_a)
        products.append(image_a @ image_b)
    for found, x, y in ((norms, a, a), (products, a, b)):
        values = torch.stack(found).double()
        expected = variance_of_product(x, y, size)
        assert float(values.mean() - x.double() @ y.double()) < 4.5 * math.sqrt(expected / seeds)
        assert float(values.mean() - x.double() @ y.double()) > -4.5 * math.sqrt(expected / seeds)
        assert float(values.var()) == pytest.approx(expected, rel=0.3)
    bound = 2 * float(folded(a.double(), size).square().sum(0).square().sum())
    assert variance_of_product(a, a, size) <= bound


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 7),
    st.lists(
        st.tuples(st.sampled_from([(1,), (3,), (2, 5), (4, 3, 2), (90,), (211, 3)]), st.integers(0, 9)),
        min_size=1,
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_tensors_anywhere_give_the_image_of_the_flat_vector(size: int, places: list, random: object) -> None:  # type: ignore[type-arg]
    # Gaps stand for parameters without a gradient; long tensors need several chunks of 64 rows.
    tensors, offsets, at = [], [], 0
    for number, (shape, gap) in enumerate(places):
        at += gap
        tensors.append(torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64))
        offsets.append(at)
        at += tensors[-1].numel()
    vector = torch.zeros(at, dtype=torch.float64)
    for tensor, offset in zip(tensors, offsets, strict=True):
        vector[offset : offset + tensor.numel()] = tensor.reshape(-1)
    before = [tensor.clone() for tensor in tensors]
    sketch = SignSketch(at, size, seed=at, dtype=torch.float64)
    expected = matrix_image(sketch, vector)

    order = list(range(len(tensors)))
    random.shuffle(order)  # type: ignore[attr-defined]
    found = sketch.of([tensors[each] for each in order], [offsets[each] for each in order])
    torch.testing.assert_close(found, expected)
    summed = torch.zeros(size, dtype=torch.float64)
    for each in order:
        sketch.add(summed, tensors[each], offsets[each], scale=-0.5)
    torch.testing.assert_close(summed, -0.5 * expected)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))
    torch.testing.assert_close(Whole(at, dtype=torch.float64).of(tensors, offsets), vector)


def test_it_is_linear() -> None:
    length = 10_000
    sketch = SignSketch(length, size=101, dtype=torch.float64)
    a, b = inputs(length)["random"].double(), inputs(length)["outer"].double()
    combined = sketch.of([3 * a - 2 * b], [0])
    torch.testing.assert_close(combined, 3 * sketch.of([a], [0]) - 2 * sketch.of([b], [0]))


def test_layout_in_memory_does_not_matter() -> None:
    weights = torch.randn(60, 20, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sketch = SignSketch(weights.numel(), size=13, dtype=torch.float64)
    other = weights.to(memory_format=torch.channels_last)
    assert not other.is_contiguous()
    torch.testing.assert_close(sketch.of([other], [0]), sketch.of([weights], [0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_single_precision(dtype: torch.dtype) -> None:
    # 500 numbers of 300 fall into each bucket, so that sums of products leave the range or precision of dtype.
    half = torch.full((500 * 17 + 3,), 300.0, dtype=dtype)
    sketch = SignSketch(len(half) + 2, size=17)
    found = sketch.of([half[:9], half[9:].view(2, -1)], [2, 11])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, sketch.of([half.float()], [2]))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 700, 9_999])
def test_what_is_not_finite_shows(bad: float, place: int) -> None:
    vector = torch.ones(10_000)
    vector[place] = bad
    image = SignSketch(10_000, size=101).of([vector], [0])
    assert [i for i, each in enumerate(image.tolist()) if not math.isfinite(each)] == [place % 101]


def test_seeds_make_maps() -> None:
    vector = inputs(500)["random"]
    first, same, other = (SignSketch(500, 31, seed).of([vector], [0]) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_a_heavy_column_of_a_matrix_spreads_over_the_buckets() -> None:
    # With 4096 buckets the 1024 numbers of one column of 512 would share 8 of them: an error of 50 %.
    assert all(SIZE % divisor for divisor in range(2, SIZE))
    weights = torch.zeros(1024, 512)
    weights[:, 77] = 1.0
    image = SignSketch(weights.numel()).of([weights], [0])
    assert float(image @ image) == pytest.approx(1024, rel=0.02)


def test_memory_is_a_multiple_of_size() -> None:
    size, length = 53, 1_000_003
    sketch = SignSketch(length, size)
    tensors = [torch.ones(length // 2), torch.ones(length - length // 2 - 9), torch.ones(3, 3)]
    offsets = [0, length // 2, length - 9]
    sketch.of(tensors, offsets)
    held = sum(tensor.numel() for tensor in tensors_in(sketch))
    assert held <= 67 * size + 2 * length / size
    with Allocations() as seen:
        sketch.of(tensors, offsets)
    assert 0 < seen.largest <= 4 * 64 * size


@pytest.mark.parametrize(("length", "size"), [(10, 0), (-1, 5)])
def test_wrong_sizes_are_refused(length: int, size: int) -> None:
    with pytest.raises(SettingError, match=r"sketch (size \(0\)|length \(-1\))"):
        SignSketch(length, size)


def test_an_empty_model_has_a_zero_image() -> None:
    assert torch.equal(SignSketch(0, 5).of([], []), torch.zeros(5))


def test_long_vectors_take_one_pass(computed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors: list[int] = []

    def seen(sketch: SignSketch, out: Tensor, left: Tensor, rights: Iterable[Tensor], offset: int) -> None:
        vectors.extend(right.numel() for right in rights)

    monkeypatch.setattr(SignSketch, "_add_fused", seen)
    SignSketch(60_000).of([torch.ones(200, 300)], [0])
    assert vectors == ([60_000] if computed == "numba" else [])
    monkeypatch.setattr(module, "has_numba", lambda: False)
    SignSketch(60_000).of([torch.ones(200, 300)], [0])
    assert len(vectors) <= 1
