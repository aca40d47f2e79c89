"""What workers tell each other of gradients: small, and put together in the same way everywhere."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.errors import LoopError
from paceline.order.fragments import Fold, Fragment, fragments_of, pack, unpack
from paceline.order.ledger import Ledger
from paceline.records import Plan


def some(count: int, size: int = 16, step: int = 3) -> list[Fragment]:
    generator = torch.Generator().manual_seed(count)
    images = (
        torch.randn(count, size, generator=generator) * 10.0 ** torch.arange(-(count // 2), count - count // 2)[:, None]
    )
    return [Fragment(step, 7 * at, at + 1, at + 0.5, image) for at, image in enumerate(images)]


def test_eight_bits_have_a_scale_for_each_image() -> None:
    told = some(9)
    for before, after in zip(told, unpack(pack(told, 16, "i1"), 16, "i1"), strict=True):
        assert before[:4] == after[:4]
        assert (before.image - after.image).abs().max() <= before.image.abs().max() / 127 * 0.501


def test_whole_numbers_of_a_double_travel_as_they_are() -> None:
    told = [each._replace(image=each.image.double()) for each in some(5)]
    for before, after in zip(told, unpack(pack(told, 16, "<f8"), 16, "<f8"), strict=True):
        assert torch.equal(before.image, after.image)


def test_a_sketch_takes_little_more_than_its_bytes() -> None:
    assert len(pack(some(10, 256), 256, "i1")) == 10 * (256 + 28)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_has_no_weight(bad: float) -> None:
    good, broken = some(2)
    broken.image[3] = bad
    found = unpack(pack([good, broken], 16, "i1"), 16, "i1")
    assert [each.weight for each in found] == [0.5, 0.0]
    assert not found[1].image.any()


def test_a_fold_keeps_inner_products_on_average() -> None:
    generator = torch.Generator().manual_seed(4)
    one, other = torch.randn(2, 300, generator=generator, dtype=torch.float64)
    found = [Fold(300, 64, seed).of(torch.stack([one, one + other])) for seed in range(400)]
    products = torch.tensor([float(rows[0] @ rows[1]) for rows in found])
    expected, error = float(one @ (one + other)), float(products.std() / 20)
    assert abs(float(products.mean()) - expected) < 4 * error
    assert error < expected / 20
    apart = Fold(300, 64, 1).of(torch.stack([one, other]))
    torch.testing.assert_close(apart.sum(0), Fold(300, 64, 1).of((one + other)[None])[0])


def test_pieces_without_weight_have_no_image() -> None:
    plan = Plan(step=2, epoch=0, starts=(4,), counts=(12,), micro=4, unit=4)
    first, last = torch.ones(3), torch.full((3,), 2.0)
    found = fragments_of(plan, 0, [4.0, 0.0, 2.0], [first, last], single=False)
    assert [each[:4] for each in found] == [(2, 4, 4, 4.0), (2, 8, 4, 0.0), (2, 12, 4, 2.0)]
    assert found[0].image is first
    assert found[2].image is last


def test_single_examples_have_places_of_their_own_also_in_ranges() -> None:
    plan = Plan(step=0, epoch=0, starts=(1,), counts=(4,), micro=4, ranges=((10, 13), (20, 30)))
    found = fragments_of(plan, 0, [4.0], list(torch.eye(4)), single=True)
    assert [(each.start, each.examples, each.weight) for each in found] == [(at, 1, 1.0) for at in (11, 12, 20, 21)]


def whole(parts: list[Fragment], exact: bool) -> torch.Tensor:
    ledger = Ledger([1], 8, exact)
    ledger.begin(parts)
    for part in parts:
        ledger.add(0, 0, part)
    rows = ledger.take(0)
    assert rows is not None
    return rows[0]


def test_a_unit_in_parts_is_their_weighted_mean_in_whatever_order_they_come() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [3, 1, 4]
    parts = [
        Fragment(5, start, size, float(size), torch.randn(32, generator=generator, dtype=torch.float64))
        for start, size in zip([0, 3, 4], sizes, strict=True)
    ]
    mean = sum((part.weight * part.image for part in parts), torch.zeros(32)) / 8
    torch.testing.assert_close(whole(parts, exact=True), mean, rtol=0, atol=1e-15)
    assert (whole(parts, exact=False) - mean).abs().max() < 4 / 2**14
    for order in ([2, 1, 0], [1, 2, 0], [2, 0, 1]):  # to the bit, before a grid hides it
        assert torch.equal(whole([parts[at] for at in order], exact=True), whole(parts, exact=True))


def one_by_one(numbers: list[float]) -> float:
    """Without what ``sum`` does for accuracy."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def test_sums_of_products_are_exact_in_any_order() -> None:
    """What different processors need to come to the same signs."""
    images = torch.randn(20, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ledger = Ledger([20], 1, exact=False)
    told = [Fragment(0, at, 1, 1.0, image) for at, image in enumerate(images)]
    ledger.begin(told)
    for at, part in enumerate(told):
        ledger.add(0, at, part)
    rows = ledger.take(0)
    assert rows is not None
    assert all(one_by_one(each) == one_by_one(each[::-1]) == math.fsum(each) for each in products(rows))
    assert any(one_by_one(each) != one_by_one(each[::-1]) for each in products(images))  # without a grid


def products(rows: torch.Tensor) -> list[list[float]]:
    """Those of neighbours, number by number."""
    return (rows[1:] * rows[:-1]).tolist()


def test_an_epochs_first_step_decides_the_grid() -> None:
    """And not what happens to be in an exchange: a checkpoint makes one more."""
    images = torch.rand(3, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.5
    told = [Fragment(4 + at, at, 1, 1.0, image * 1000.0**at) for at, image in enumerate(images)]
    rows = []
    for exchanges in ([told], [told[:1], told[1:]]):
        ledger = Ledger([3], 1, exact=False)
        for fragments in exchanges:
            ledger.begin(fragments)
            for each in fragments:
                ledger.add(0, each.start, each)
        found = ledger.take(0)
        assert found is not None
        rows.append(found)
    assert torch.equal(rows[0], rows[1])
    assert (rows[0][0] - images[0]).abs().max() < 2 / 2**14  # by the last step it would be all zeros


def test_what_was_not_finite_or_is_zero_does_not_decide_the_grid() -> None:
    image = torch.rand(16, generator=torch.Generator().manual_seed(3), dtype=torch.float64) / 100
    overflow, nothing = Fragment(0, 0, 1, 0.0, torch.zeros(16)), Fragment(1, 1, 1, 1.0, torch.zeros(16))
    ledger = Ledger([3], 1, exact=False)
    found = []
    for told in ([overflow, nothing], [Fragment(2, 2, 1, 1.0, image)]):
        ledger.begin(told)
        for each in told:
            ledger.add(0, each.start, each)
        found.append(ledger.take(0))
    assert found[0] is not None
    assert torch.equal(found[0], torch.zeros(2, 16, dtype=torch.float64))
    assert found[1] is not None
    assert (found[1][0] - image).abs().max() < 0.02 / 2**14


@pytest.mark.parametrize("exchanges", [1, 4])
def test_a_unit_without_weight_holds_nobody_up_whenever_workers_tell_each_other(exchanges: int) -> None:
    ledger = Ledger([4, 1], 1, exact=True)
    rows = torch.tensor([[2.0], [4.0], [9.0]], dtype=torch.float64)
    told = [Fragment(0, at, 1, 1.0, row) for at, row in zip([0, 1, 3], rows, strict=True)]
    told.insert(2, Fragment(0, 2, 1, 0.0, torch.zeros(1)))
    ledger.add(1, 0, Fragment(0, 4, 1, 1.0, torch.tensor([50.0], dtype=torch.float64)))
    other, found = [], []
    for at in range(exchanges):
        for each in told[at * 4 // exchanges : (at + 1) * 4 // exchanges]:
            ledger.add(0, each.start, each)
        other += [] if (more := ledger.take(1)) is None else more.tolist()
        found += [] if (more := ledger.take(0)) is None else more.tolist()
    assert found == [[2.0], [4.0], [3.0], [9.0]]
    assert other == [[50.0]]
    assert ledger.state_dict()["fragments"] == []


def test_gradients_that_grow_are_cut_off_where_sums_would_not_be_exact_any_more() -> None:
    ledger = Ledger([2], 1, exact=False)
    told = [Fragment(at, at, 1, 1.0, torch.tensor([size], dtype=torch.float64)) for at, size in enumerate([1.0, 1e9])]
    ledger.begin(told)
    for each in told:
        ledger.add(0, each.start, each)
    found = ledger.take(0)
    assert found is not None
    assert found.tolist() == [[1.0], [128.0]]  # 2^20 steps of 2^-13


def test_who_was_not_seen_counts_as_the_mean_of_the_others() -> None:
    ledger = Ledger([3], 2, exact=True)
    rows = torch.tensor([[2.0, 0.0], [4.0, 6.0]], dtype=torch.float64)
    ledger.add(0, 0, Fragment(0, 0, 2, 2.0, rows[0]))
    ledger.add(0, 2, Fragment(0, 4, 2, 2.0, rows[1]))
    first = ledger.take(0)
    assert first is not None
    assert torch.equal(first, rows[:1])
    (rest,) = ledger.rest()
    assert rest is not None
    assert torch.equal(rest, torch.tensor([[3.0, 3.0], [4.0, 6.0]], dtype=torch.float64))


def test_an_epoch_without_any_gradient_is_an_error() -> None:
    ledger = Ledger([2], 2, exact=True)
    ledger.add(0, 0, Fragment(0, 0, 2, 0.0, torch.zeros(4)))
    with pytest.raises(LoopError, match="without any gradient that an order could learn from"):
        ledger.rest()
