"""The lattice: the nearest point within its range, and never a wrong one in silence."""

from __future__ import annotations

import pytest
import torch
from _pytest.mark import ParameterSet
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import paceline as pl
from paceline.codec import Lattice, lattice
from paceline.codec.lattice import _weights
from paceline.codec.packing import pack, packed_bytes, unpack
from paceline.codec.rounding import FINEST, SLACK, SMALLEST, scales_for
from paceline.errors import SettingError

BITS = range(2, 17)
COMPILED = (4, 7, 8)  # each takes seconds to compile
LATER = (2, 11, 16)


def slow(value: object) -> ParameterSet:
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture(params=["numba", "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of the two computes the lattice."""
    monkeypatch.setattr(lattice, "has_numba", lambda: request.param == "numba")
    assert Lattice().kernel == request.param


def numbers(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, generator=generator)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 16), st.integers(0, 70), st.integers(0, 1000))
def test_packed_codes_come_back(bits: int, numel: int, seed: int) -> None:
    """What is above the lowest bits is dropped."""
    codes = torch.randint(1 << bits, (numel,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    payload = torch.full((packed_bytes(numel, bits),), 255, dtype=torch.uint8)
    pack(codes - (3 << bits), bits, payload)
    assert torch.equal(unpack(payload, bits, numel) & ((1 << bits) - 1), codes)
    assert packed_bytes(800, bits) == 100 * bits


@pytest.mark.parametrize(
    ("kernel", "bits", "dithered"),
    [
        *(("numba", bits, False) for bits in COMPILED),
        *(pytest.param("numba", bits, False, marks=pytest.mark.slow) for bits in LATER),
        *(("torch", bits, dithered) for bits in BITS for dithered in (False, True)),
    ],
    indirect=["kernel"],
)
@pytest.mark.usefixtures("kernel")
def test_exactly_the_nearest_point_within_range(bits: int, dithered: bool) -> None:
    codec = Lattice(bits, block=512, dithered=dithered)
    values = numbers(5000) * torch.linspace(0.01, 10, 5000)
    reach = torch.linspace(1e-3, 0.1, codec.blocks(5000))
    away = reach.repeat_interleave(512)[:5000] * (
        1.99 * torch.rand(5000, generator=torch.Generator().manual_seed(1)) - 0.995
    )
    near = values + away
    # As far away as allowed, but for the rounding of this sum.
    near[::7] = values[::7] + reach.repeat_interleave(512)[:5000][::7] * (1 - 2.0**-10)
    shown = torch.empty(5000)
    payload = codec.encode(values, reach, seed=5, points=shown)
    assert payload.numel() == codec.bytes_for(5000)
    theirs, own, apart = torch.empty(5000), torch.empty(5000), torch.empty(codec.blocks(5000))
    assert codec.decode(payload, near, theirs, apart, seed=5) == 0
    assert codec.decode(payload, values, own, seed=5) == 0
    assert torch.equal(theirs, own)  # both see the same point
    assert torch.equal(shown, own)
    scales = payload[: 4 * codec.blocks(5000)].clone().view(torch.float32).double()
    scale = scales.repeat_interleave(512)[:5000]
    if not dithered:
        points = (values.double() / scale).round() * scale
        assert torch.equal(own, points.float())
    # Half a step, and the rounding of the point and of the difference to single precision.
    assert ((own - values).double().abs() <= 0.5 * scale + 2.0**-23 * values.abs()).all()
    expected = torch.stack([part.abs().max() for part in torch.split(own - near, 512)])
    assert torch.equal(apart, expected)


def test_the_scale_is_what_the_formula_says() -> None:
    reach, largest = torch.tensor([0.5, 0.0, 1e-9, 1.0]), torch.tensor([2.0, 0.0, 8.0, torch.inf])
    scales = scales_for(reach, largest, 8)
    assert 2 * 0.5 / (256 - SLACK) <= scales[0].item() == 2.0**-7  # the next power of two
    assert scales[1].item() == SMALLEST
    assert scales[2].item() == 8 * FINEST  # finer, and indices would not be whole numbers
    assert scales[3].isnan()
    assert scales_for(torch.tensor([torch.inf, torch.nan, 3e38]), torch.ones(3), 2).isnan().all()


@pytest.mark.parametrize("bits", [slow(2), 4, 8, slow(16)])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.usefixtures("kernel")
def test_every_number_that_is_too_far_away_is_noticed(bits: int, several: bool) -> None:
    """A block with one, or with some, wrong numbers: 1.6 million blocks over all cases, with each kernel."""
    codec, blocks = Lattice(bits, block=64), 20_000
    generator = torch.Generator().manual_seed(bits)
    for _ in range(10):
        values = torch.randn(64 * blocks, generator=generator)
        payload = codec.encode(values, torch.full((blocks,), 0.01), seed=0)
        scale = payload[: 4 * blocks].view(torch.float32).unsqueeze(1)
        near = values.clone().view(blocks, 64)
        chosen = torch.rand(blocks, 64, generator=generator) < (0.2 if several else 0.0)
        chosen[torch.arange(blocks), torch.randint(64, (blocks,), generator=generator)] = True
        # By more than half of a period, and a step for rounding, up to a hundred of them, in both directions.
        steps = (1 << bits) * (0.5 + 100 * torch.rand(blocks, 64, generator=generator)) + 1.1
        periods = steps * scale
        signs = 2.0 * torch.randint(2, (blocks, 64), generator=generator) - 1
        near += torch.where(chosen, periods * signs, 0.0)
        assert codec.decode(payload, near.view(-1), torch.empty(64 * blocks)) == blocks


@pytest.mark.usefixtures("kernel")
def test_what_is_not_finite_is_noticed() -> None:
    codec, reach = Lattice(8, block=64), torch.full((3,), 0.1)
    for bad in (torch.nan, torch.inf, -torch.inf):
        values = numbers(192)
        values[70] = bad
        assert codec.decode(codec.encode(values, reach), numbers(192), torch.empty(192)) == 1
    assert codec.decode(codec.encode(numbers(192), reach * torch.inf), numbers(192), torch.empty(192)) == 3
    near = numbers(192)
    near[70] = torch.nan  # the receiver's own
    assert codec.decode(codec.encode(numbers(192), reach), near, torch.empty(192)) == 1
    near[70] = 1e38
    assert codec.decode(codec.encode(numbers(192), reach), near, torch.empty(192)) == 1


def test_two_wrong_numbers_never_hide_each_other() -> None:
    weights = _weights(4096).long()
    assert len(set(weights.tolist())) == 4096
    assert (weights % 2 == 1).all()
    assert weights.min() > 0  # so that no two add up to 2^32


def test_dithering_has_no_bias_and_rounding_has() -> None:
    values, reach = torch.full((4096,), 0.3), torch.full((1,), 1.0)
    scale = float(scales_for(reach, values[:1], 4))
    out = torch.empty(4096)

    def mean_error(dithered: bool) -> float:
        codec = Lattice(4, dithered=dithered)
        errors = []
        for seed in range(50):
            assert codec.decode(codec.encode(values, reach, seed), values, out, seed=seed) == 0
            errors.append(float((out - values).mean()))
        return abs(sum(errors) / 50)

    nearest = abs(round(0.3 / scale) * scale - 0.3)
    assert mean_error(False) == pytest.approx(nearest, rel=1e-3)
    # The error of one number is uniform over a step: its standard deviation is that over the root of 12.
    assert mean_error(True) < 4 * scale / (12 * 50 * 4096) ** 0.5


@pytest.mark.usefixtures("kernel")
def test_large_numbers_and_small_distances() -> None:
    values = 1000 + numbers(4096)
    near = values + 1e-4 * numbers(4096, seed=1).clamp(-1, 1)
    codec, out = Lattice(8), torch.empty(4096)
    assert codec.decode(codec.encode(values, torch.full((1,), 1e-4)), near, out) == 0
    assert float((out - values).abs().max()) <= 1e-4 / 255 + float(values.max()) * FINEST


@pytest.mark.parametrize(("bits", "most"), [(8, 0.27), (4, 0.14), (16, 0.51), (2, 0.07)])
def test_bytes(bits: int, most: float) -> None:
    assert Lattice(bits).bytes_for(1_000_000) <= most * 4_000_000
    assert Lattice(bits).bytes_for(0) == 0


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("bits", [7, 8, slow(16)])
def test_short_and_unaligned(bits: int) -> None:
    codec = Lattice(bits, block=64)
    for numel in (0, 1, 63, 64, 65, 200):
        values, out = numbers(numel), torch.empty(numel)
        payload = codec.encode(values, torch.full((codec.blocks(numel),), 0.1))
        moved = torch.cat([torch.zeros(1, dtype=torch.uint8), payload])[1:]  # where no float32 can begin
        assert codec.decode(moved, values + 0.05, out) == 0
        assert torch.allclose(out, values, atol=0.1)


def test_others_have_no_use_for_it() -> None:
    for make in (lambda: pl.sync.AllReduce(Lattice()), lambda: pl.sync.LocalSGD(4, codec=Lattice())):  # type: ignore[arg-type]
        with pytest.raises(SettingError, match=r"nothing near what is sent, from which Lattice\(.*use Half, BFloat16"):
            make()


def test_bad_input() -> None:
    for bits in (1, 17, 8.0, True):
        with pytest.raises(SettingError, match=r"bits .* must be a whole number from 2 to 16; use Identity for 32"):
            Lattice(bits)  # type: ignore[arg-type]
    for block in (0, 60, 100, 64.0):
        with pytest.raises(SettingError, match=r"block .* must be a multiple of 8, and at least 64"):
            Lattice(block=block)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"a payload of 10 bytes is not one of 64 numbers, for which Lattice"):
        Lattice().decode(torch.zeros(10, dtype=torch.uint8), torch.zeros(64), torch.zeros(64))


@pytest.mark.parametrize("choice", [COMPILED, slow(LATER)], ids=["soon", "later"])
@settings(max_examples=100, deadline=None)
@given(
    index=st.integers(0, 2),
    numel=st.integers(0, 300),
    seed=st.integers(0, 1000),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    far=st.sampled_from([0.0, 0.3, 0.99, 3.0]),
    bad=st.sampled_from([None, torch.nan, torch.inf]),
)
def test_both_kernels_give_the_same_bits(
    choice: tuple[int, ...], index: int, numel: int, seed: int, size: float, far: float, bad: float | None
) -> None:
    codec = Lattice(choice[index], block=64)
    values, reach = size * numbers(numel, seed), 0.01 * size * numbers(codec.blocks(numel), seed).abs()
    away = reach.repeat_interleave(64)[:numel] * numbers(numel, seed + 1).clamp(-1, 1)
    near = values + far * away
    if bad is not None and numel:
        values[seed % numel] = bad
    found = []
    for has_numba in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lattice, "has_numba", lambda has_numba=has_numba: has_numba)
            points, out, apart = torch.zeros(numel), torch.zeros(numel), torch.zeros(codec.blocks(numel))
            payload = codec.encode(values, reach, points=points)
            wrong = codec.decode(payload, near, out, apart)
            found.append((payload, points, out, apart, wrong))
    first, second = found
    assert first[4] == second[4] >= (bad is not None and numel > 0)
    scales = first[0][: 4 * codec.blocks(numel)].view(torch.float32)
    finite = scales.isfinite().repeat_interleave(64)[:numel]
    for one, other in zip(first[1:3], second[1:3], strict=True):
        assert torch.equal(one[finite], other[finite])
    assert torch.equal(first[3].nan_to_num(), second[3].nan_to_num())
    if bad is None:
        assert torch.equal(first[0], second[0])
    if far < 1 and bad is None:
        assert first[4] == 0


def test_other_numbers_are_refused() -> None:
    for values in (torch.zeros(64, dtype=torch.float64), torch.zeros(8, 8), torch.zeros(128)[::2]):
        with pytest.raises(SettingError, match=r"flat contiguous tensors of float32, not on .*; give it values\.float"):
            Lattice().encode(values, torch.zeros(1))
        with pytest.raises(SettingError, match="flat contiguous tensors of float32"):
            Lattice().decode(torch.zeros(72, dtype=torch.uint8), values, torch.zeros(64))
