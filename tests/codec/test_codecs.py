"""Every codec: how far a number may be off, how long a payload is, and what becomes of extremes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import paceline as pl
from paceline.codec import BFloat16, Half, Identity, Uniform8
from paceline.codec.uniform import CHUNK, scales_of
from paceline.roles import Codec

CODECS: list[Codec] = [Half(), BFloat16(), Uniform8(), Uniform8(block=8), Uniform8(block=300)]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)
LENGTHS = [0, 1, 7, 255, 256, 257, 2000]
BYTES = {
    "Half()": [0, 2, 14, 510, 512, 514, 4000],
    "BFloat16()": [0, 2, 14, 510, 512, 514, 4000],
    "Uniform8(block=256)": [0, 5, 11, 259, 260, 265, 2032],
    "Uniform8(block=8)": [0, 5, 11, 383, 384, 389, 3000],
    "Uniform8(block=300)": [0, 5, 11, 259, 260, 261, 2028],
}


def test_the_catalogue_is_complete() -> None:
    # Lattice is decoded by who has nearly the same numbers, and has tests of its own.
    assert {type(codec).__name__ for codec in [*CODECS, Identity()]} == set(pl.codec.__all__) - {"Lattice"}


def test_identity_changes_nothing() -> None:
    for values in (numbers(1000), numbers(1000).double()):
        assert torch.equal(round_trip(Identity(), values), values)
    assert Identity().bytes_for(1000) == Identity().encode(numbers(1000)).nbytes
    assert not Identity().feedback


def numbers(length: int, seed: int = 0) -> Tensor:
    """Normal numbers whose size varies over six decades, as gradients of different layers do."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (6 * torch.rand(length, generator=generator) - 4)
    return torch.randn(length, generator=generator) * sizes


def round_trip(codec: Codec, values: Tensor) -> Tensor:
    out = torch.empty_like(values)
    codec.decode(codec.encode(values), out)
    return out


def bound(codec: Codec, values: Tensor) -> Tensor:
    """How far each number may be off, from the definition of the format, without the code under test."""
    exact = values.double()
    if isinstance(codec, Half):  # half of the last of 11 bits, or of the smallest step, 2^-24
        return (exact.abs() * 2.0**-11).clamp(min=2.0**-25)
    if isinstance(codec, BFloat16):  # half of the last of 8 bits
        return exact.abs() * 2.0**-8
    assert isinstance(codec, Uniform8)
    blocks = torch.split(exact, codec.block)
    half_steps = torch.cat([part.abs().max().expand(len(part)) / 127 / 2 for part in blocks])
    # The scale, the quotient and the product are rounded to 24 bits, with an effect in proportion to up to 127 steps.
    return half_steps * (1 + 2 * 127 * 3 * 2.0**-24)


@every_codec
@pytest.mark.parametrize("length", [1, 7, 256, 2000, CHUNK + 777])
def test_a_number_is_off_by_at_most_half_a_step(codec: Codec, length: int) -> None:
    values = numbers(length)
    error = (round_trip(codec, values).double() - values.double()).abs()
    assert (error <= bound(codec, values)).all()


def test_the_bounds_are_tight() -> None:
    """A codec that is better than its bound would hide one that is worse than it should be."""
    for codec in CODECS:
        values = numbers(20_000)
        error = (round_trip(codec, values).double() - values.double()).abs()
        assert (error > 0.9 * bound(codec, values)).any(), codec


@every_codec
def test_bytes_are_as_told(codec: Codec) -> None:
    for length, told in zip(LENGTHS, BYTES[repr(codec)], strict=True):
        payload = codec.encode(numbers(length))
        assert (payload.dtype, payload.shape) == (torch.uint8, (told,))
        assert codec.bytes_for(length) == told


@pytest.mark.parametrize("numel", [256, 1000, 100_000])
def test_eight_bits_are_about_a_quarter(numel: int) -> None:
    assert Uniform8().bytes_for(numel) <= 0.27 * 4 * numel


@every_codec
def test_the_same_values_give_the_same_bytes(codec: Codec) -> None:
    values = numbers(3000)
    before = values.clone()
    assert torch.equal(codec.encode(values), codec.encode(values.clone()))
    assert torch.equal(values, before)


@every_codec
def test_a_payload_decodes_to_what_it_was_encoded_from(codec: Codec) -> None:
    """Encoding what was decoded loses nothing more, for the floating-point formats; and hardly more, for levels."""
    once = round_trip(codec, numbers(1000))
    twice = round_trip(codec, once)
    # The largest number of a block may come back with its last bit changed, and the scale with it.
    torch.testing.assert_close(twice, once, rtol=0 if not codec.feedback else 2.0**-22, atol=0)


@every_codec
def test_every_second_number(codec: Codec) -> None:
    values = numbers(2000)
    apart, out = values[::2], torch.zeros(2000)
    assert torch.equal(codec.encode(apart), codec.encode(apart.contiguous()))
    codec.decode(codec.encode(apart), out[::2])
    assert torch.equal(out[::2], round_trip(codec, apart.contiguous()))
    assert not out[1::2].any()


@every_codec
def test_other_shapes_are_taken_flat(codec: Codec) -> None:
    values = numbers(600)
    out = torch.empty(20, 30)
    codec.decode(codec.encode(values.view(20, 30)), out)
    assert torch.equal(out.view(-1), round_trip(codec, values))


@every_codec
def test_a_payload_may_begin_anywhere(codec: Codec) -> None:
    values = numbers(600)
    payload = codec.encode(values)
    for offset in (1, 2, 3):
        moved = torch.zeros(len(payload) + offset, dtype=torch.uint8)[offset:].copy_(payload)
        out = torch.empty(600)
        codec.decode(moved, out)
        assert torch.equal(out, round_trip(codec, values))


@every_codec
def test_float64_is_taken_as_float32(codec: Codec) -> None:
    values = numbers(1000)
    wide = values.double() * (1 + 2.0**-40)  # the last bits are those that float32 does not have
    assert torch.equal(codec.encode(wide), codec.encode(values))
    assert torch.equal(round_trip(codec, wide), round_trip(codec, values).double())


@every_codec
def test_zeros_stay_zeros(codec: Codec) -> None:
    assert not round_trip(codec, torch.zeros(700)).any()


@every_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_does_not_become_finite(codec: Codec, bad: float) -> None:
    values = numbers(1000)
    values[517] = bad
    found = round_trip(codec, values)
    block = codec.block if isinstance(codec, Uniform8) else 1
    first = 517 // block * block
    assert not found[first : first + block].isfinite().any()
    assert found[:first].isfinite().all()
    assert found[first + block :].isfinite().all()


@every_codec
def test_tiny_numbers_become_small_ones_at_worst(codec: Codec) -> None:
    """Near the end of float32 a scale is not exact any more, and dividing by it would make large numbers."""
    for size in (1e-45, 1e-42, 1e-38, 1e-36, 1e-30):
        values = torch.tensor([size, -size, size / 2, 0.0])
        found = round_trip(codec, values)
        # A block whose scale is not a normal number becomes zero.
        assert (found.abs() <= size * (1 + 2.0**-7)).all(), size


@pytest.mark.parametrize("codec", [BFloat16(), Uniform8()], ids=repr)
def test_large_numbers(codec: Codec) -> None:
    values = torch.tensor([3e38, -3e38, 1e38, 0.0])
    error = (round_trip(codec, values).double() - values.double()).abs()
    assert (error <= bound(codec, values)).all()


def test_half_ends_at_65504() -> None:
    values = torch.tensor([65504.0, -65519.0, 1.0])
    assert round_trip(Half(), values).tolist() == [65504.0, -65504.0, 1.0]
    for beyond in (65520.0, -1e6, 1e300):
        told = rf"Half cannot carry {beyond:g}: .* end at 65504 \(1 of 2 are beyond\); use BFloat16"
        with pytest.raises(pl.SettingError, match=told.replace("+", r"\+")):
            Half().encode(torch.tensor([1.0, beyond], dtype=torch.float64))


def test_half_finds_what_is_too_large_beside_infinity() -> None:
    assert Half().encode(torch.tensor([math.inf, math.nan, 5.0])).numel() == 6
    with pytest.raises(pl.SettingError, match="Half cannot carry 70000"):
        Half().encode(torch.tensor([math.inf, math.nan, 70000.0]))


@every_codec
def test_a_payload_of_another_length_is_refused(codec: Codec) -> None:
    with pytest.raises(pl.SettingError, match="decode with the codec and the length that it was encoded with"):
        codec.decode(codec.encode(numbers(100)), torch.empty(99))


@pytest.mark.parametrize("block", [0, -1, 7, 256.0, True, "256"])
def test_blocks_that_cannot_be(block: int) -> None:
    with pytest.raises(pl.SettingError, match=r"block \(.*\) must be a whole number of at least 8"):
        Uniform8(block=block)


def test_scales_by_hand() -> None:
    found = scales_of(torch.tensor([127.0, 254.0, 0.0, 1e-37, math.inf, math.nan]))
    assert found[:5].tolist() == [1.0, 2.0, 0.0, 0.0, math.inf]
    assert found[5].isnan()


def test_codes_by_hand() -> None:
    values = torch.tensor([127.0, -127.0, 0.4, -0.6, 1.5, 2.5, 0.0, 100.2, 254.0, 1.0])
    payload = Uniform8(block=8).encode(values)
    assert payload[:8].view(torch.float32).tolist() == [1.0, 2.0]
    # A half is rounded to the even code.
    assert payload[8:].view(torch.int8).tolist() == [127, -127, 0, -1, 2, 2, 0, 100, 127, 0]


@pytest.mark.parametrize("rounds", [10, 100])
def test_with_feedback_the_mean_is_right(rounds: int) -> None:
    """What was sent in T rounds is T x - r, with a rest r of at most half a step: the mean is off by r / T."""
    codec, values = Uniform8(), numbers(1000)
    lost, total, without = torch.zeros(1000), torch.zeros(1000, dtype=torch.float64), torch.zeros(1000).double()
    for _ in range(rounds):
        decoded = round_trip(codec, values + lost)
        lost = values + lost - decoded
        total += decoded
        without += round_trip(codec, values)
    # The largest number grows by the rest, and the step with it: by 1 / 253 at most. Each round also rounds twice to 24
    # bits of at most the largest number, which is 127 steps.
    step = 2 * bound(codec, values)
    limit = step / 2 * (1 + 1 / 253) / rounds + 2 * 127 * step * 2.0**-24
    assert ((total / rounds - values.double()).abs() <= limit).all()
    # Without feedback, the error is as large after many rounds as after one: for many numbers beyond the limit.
    assert ((without / rounds - values.double()).abs() > limit).sum() > 250
