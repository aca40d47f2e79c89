from __future__ import annotations

import math

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.records import Note
from paceline.sync.notes import NotesTable, join_halves, split_halves


@given(st.integers(0, 2**48 - 1))
def test_whole_numbers_of_48_bits_survive_float32(number: int) -> None:
    halves = split_halves(np.array([float(number)])).astype(np.float32)
    assert join_halves(halves.astype(np.float64))[0] == number


def test_what_is_not_finite_stays_so() -> None:
    halves = split_halves(np.array([math.nan, math.inf, -math.inf]))
    back = join_halves(halves)
    assert math.isnan(back[0])
    assert back[1] == math.inf
    assert back[2] == -math.inf


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
