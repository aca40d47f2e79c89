"""Sketches of outer products in one pass that forms nothing, compiled by numba: what ``SignSketch.add_rows`` gives.

Only imported where numba is installed. The buckets, a window of the signs and one input stay in the nearest cache.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from paceline.codec.fused import compiled

__all__ = ["add_outer"]

Array = NDArray[Any]


@compiled
def add_outer(out: Array, left: Array, right: Array, rows: Array, columns: Array, offset: int) -> None:
    """Add to each row of ``out`` (B, size) the image of left right^T, which sits at flat position ``offset``.

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
