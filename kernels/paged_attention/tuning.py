"""
Tile shapes and split counts of the Triton kernels of paged attention: a table instead of a search
at run time, so that captured graphs and compiled kernels never depend on chance.

Only the number of programs depends on the rows of a batch. It changes the programs that compute the
parts of a row, but not the arithmetic: see `DecodeTuning`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.rounding import power_of_two

NUM_MULTIPROCESSORS = 132
"""Number of multiprocessors of an H100 or H200; other devices are only less well balanced."""

HEADS_PER_PROGRAM = 16
"""
Query heads of one key head that a program of decode attention computes: the least that the matrix
units take. Programs of a larger group follow one another and find its keys in cache.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTuning:
    """
    The tiles and chunks that decode attention is cut into.

    A row's tiles are cut into chunks by its own length alone; each chunk is computed from scratch
    and the chunks are merged first to last. So a row's bits are the same whichever programs compute
    its chunks.

    Attributes:
        tile: Number of positions that are loaded together.
        num_warps: Warps of 32 threads per program.
        num_stages: Tiles in flight at once.
        min_chunk: Positions of a chunk of a short row, a multiple of `tile`.
        max_chunks: Most chunks of a row; longer rows have longer chunks.
        max_registers: Most registers of a thread; None leaves the choice to the compiler. Without a
            limit the assembler chooses one by itself, and prefers spilling a register or two to
            running fewer programs at once.
        programs_per_multiprocessor: Number of programs to aim for, five times as many as fit at
            once: rows differ in length, and the end of a launch must not be left to a few long
            ones. Programs without a chunk end at once.
    """

    tile: int
    num_warps: int
    num_stages: int
    min_chunk: int = 256
    max_chunks: int = 32
    max_registers: int | None = None
    programs_per_multiprocessor: int = 16


MANY_KV_HEADS = 8
"""Key heads from which a row's chunks are as many as the table says; with fewer they are twice."""

DECODE_TILES: dict[tuple[int, int], DecodeTuning] = {
    (64, 2): DecodeTuning(tile=128, num_warps=4, num_stages=5),
    (128, 2): DecodeTuning(tile=64, num_warps=4, num_stages=5),
    (256, 2): DecodeTuning(tile=32, num_warps=4, num_stages=5),
    (64, 4): DecodeTuning(tile=32, num_warps=4, num_stages=3),
    (128, 4): DecodeTuning(tile=16, num_warps=4, num_stages=2),
    (256, 4): DecodeTuning(tile=16, num_warps=8, num_stages=3, max_registers=128),
}
"""
Tunings by padded head size and bytes of a number.

Block numbers are loaded too, so stages come in pairs: 5 hold two tiles of 32 KB, one being loaded
while the other is used, and 3 programs fill a multiprocessor's shared memory. That is several times
what hides the memory's latency, so that the last programs of a launch still use all of its
bandwidth. float32 is for checking. All block sizes use the same entries: a row's bits do not depend
on them either.
"""


def padded_head_dim(head_dim: int) -> int:
    """Return the width of tiles for a head size: a power of two, at least 64."""
    return max(64, power_of_two(head_dim))


def decode_tuning(*, head_dim: int, num_kv_heads: int, dtype: torch.dtype) -> DecodeTuning:
    """
    Return the tuning for a model's heads.

    Raises:
        ValueError: The table does not have this head size or number type.
    """
    found = DECODE_TILES.get((padded_head_dim(head_dim), dtype.itemsize))
    if found is None:
        raise ValueError(f"head size must be at most 256 and {dtype} of 2 or 4 bytes: {head_dim}")
    return for_kv_heads(found, num_kv_heads)


def for_kv_heads(tuning: DecodeTuning, num_kv_heads: int) -> DecodeTuning:
    """Return a table's tuning for a model with so many key heads."""
    if num_kv_heads >= MANY_KV_HEADS:
        return tuning
    return replace(tuning, max_chunks=2 * tuning.max_chunks)


def decode_splits(tuning: DecodeTuning, *, num_rows: int, num_heads: int, num_kv_heads: int) -> int:
    """
    Return the number of programs that share the chunks of a row and key head; a single program
    merges them itself and needs no second launch.
    """
    programs = num_rows * num_kv_heads * programs_per_kv_head(num_heads, num_kv_heads)
    wanted = tuning.programs_per_multiprocessor * NUM_MULTIPROCESSORS
    if programs >= wanted - NUM_MULTIPROCESSORS:
        return 1
    return min(tuning.max_chunks, -(-wanted // programs))


def programs_per_kv_head(num_heads: int, num_kv_heads: int) -> int:
    """Return the number of programs for one key head's group of query heads."""
    return -(-num_heads // (num_kv_heads * HEADS_PER_PROGRAM))
