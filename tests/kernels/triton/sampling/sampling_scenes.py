"""Batches that the tests of the Triton sampler share."""

from __future__ import annotations

from kernels.sampling import SamplingColumns
from tests.kernels.sampling.rows import make_columns

KINDS = [(1.0, 0, 1.0), (0.0, 0, 1.0), (0.7, 40, 0.9), (1.3, 0, 0.95), (2.0, 7, 1.0), (0.9, 1, 0.5)]
"""Temperature, top_k and top_p: noise alone, greedy, both cuts, each alone, greedy by top_k."""


def mixed_columns(num_rows: int, *, min_p: float | list[float] | None = None) -> SamplingColumns:
    """Rows of every kind in turn, each with its own seed and position."""
    rows = [KINDS[row % len(KINDS)] for row in range(num_rows)]
    return make_columns(
        num_rows,
        temperature=[row[0] for row in rows],
        top_k=[row[1] for row in rows],
        top_p=[row[2] for row in rows],
        seed=[1000 + 17 * row for row in range(num_rows)],
        first_position=90,
        min_p=min_p,
    )
