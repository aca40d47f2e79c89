"""Sketches and sums of squares in one pass that forms nothing, compiled by numba.

Only imported where numba is installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.compiled import compiled

__all__ = ["add_outer", "sum_of_squares"]

Array = NDArray[Any]

LANES = 256  # so that the compiler computes several at a time without changing the order of the sum


@compiled
def add_outer(out: Array, left: Array, right: Array, rows: Array, columns: Array, offset: int) -> None:
    """Add to each row of ``out`` (B, size) the image of left right^T, which sits at flat position ``offset``.

    What ``SignSketch.add_rows`` gives. The buckets, a window of the signs and one input stay in the nearest cache.

    ``left`` is (B, n), ``right`` (B, m); the sign of number c of row r is ``rows[r] * columns[r + c]``.
    """
    size = out.shape[1]
    for example in range(out.shape[0]):
        image, vector = out[example], right[example]
        row, bucket = offset // size, offset % size
        for number in range(left.shape[1]):
            done = 0
            while done < vector.size:
                count = min(vector.size - done, size - bucket)
                factor = rows[row] * left[example, number]
                here, signs = image[bucket : bucket + count], columns[row + bucket : row + bucket + count]
                numbers = vector[done : done + count]
                for at in range(count):
                    here[at] += factor * signs[at] * numbers[at]
                done += count
                bucket += count
                if bucket == size:
                    row, bucket = row + 1, 0


@compiled
def sum_of_squares(vector: Array) -> float:
    """The squared norm of a vector in single precision, in double.

    Squares of single-precision numbers are exact in double, and the order of the sum is written down here: it is the
    same to the last bit on every processor.
    """
    lanes = np.zeros(LANES)
    even = vector.size // LANES * LANES
    for start in range(0, even, LANES):
        numbers = vector[start : start + LANES]
        for lane in range(LANES):
            lanes[lane] += np.float64(numbers[lane]) * np.float64(numbers[lane])
    for at in range(even, vector.size):
        lanes[at - even] += np.float64(vector[at]) * np.float64(vector[at])
    total = 0.0
    for lane in range(LANES):
        total += lanes[lane]
    return total
