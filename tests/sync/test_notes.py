from __future__ import annotations

import math

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.records import Note
from paceline.sync.notes import NotesTable, split_halves


@given(st.integers(0, 2**48 - 1))
def test_whole_numbers_of_48_bits_survive_float32(number: int) -> None:
    (high,), (low,) = split_halves([float(number)])
    assert float(np.float32(high)) == high
    assert float(np.float32(low)) == low
    assert high + low == number


def test_what_is_not_finite_stays_so() -> None:
    high, low = split_halves([math.nan, math.inf, -math.inf, -1e300, 2.5])
    assert math.isnan(high[0])
    assert high[1:] == [math.inf, -math.inf, -math.inf, 2.5]
    assert low == [0.0] * 5


def test_the_sum_of_the_tables_is_everybodys_notes() -> None:
    fields = len(msgspec.structs.fields(Note))
    notes = [Note(*(float(100 * rank + at) for at in range(fields))) for rank in range(3)]
    tables = [NotesTable(rank, 3) for rank in range(3)]
    total = np.zeros(tables[0].numel, dtype=np.float32)
    for table, note in zip(tables, notes, strict=True):
        table.own = note
        numbers = np.empty(table.numel)
        table.write(numbers)
        total += numbers.astype(np.float32)
    tables[1].read(total.astype(np.float64))
    assert list(tables[1].all) == notes
