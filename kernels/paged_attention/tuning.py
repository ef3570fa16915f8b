"""
Tile shapes and split counts of the Triton kernels of paged attention: a table instead of a search
at run time, so that captured graphs and compiled kernels never depend on chance.

Only the number of programs depends on the rows of a batch. It changes the programs that compute the
parts of a row, but not the arithmetic: see `DecodeTuning`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NUM_MULTIPROCESSORS = 132
"""Number of multiprocessors of an H100 or H200; other devices are only less well balanced."""

_PROGRAMS_WANTED = 16 * NUM_MULTIPROCESSORS
"""
Number of programs to aim for, five times as many as fit at once: rows differ in length, and the end
of a launch must not be left to a few long ones. Programs without a chunk end at once.
"""

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
        max_registers: Most registers of a thread; None leaves the choice to the compiler.
    """

    tile: int
    num_warps: int
    num_stages: int
    min_chunk: int
    max_chunks: int
    max_registers: int | None = None


DECODE_TILES: dict[tuple[int, int], tuple[int, int, int]] = {
    (64, 2): (128, 4, 5),
    (128, 2): (64, 4, 5),
    (256, 2): (32, 4, 5),
    (64, 4): (32, 4, 3),
    (128, 4): (16, 4, 2),
    (256, 4): (16, 8, 3),
}
"""
Tile, warps and stages by padded head size and bytes of a number.

Block numbers are loaded too, so stages come in pairs: 5 hold two tiles of 32 KB, one being loaded
while the other is used, and 3 programs fill a multiprocessor's shared memory. That is several times
what hides the memory's latency, so that the last programs of a launch still use all of its
bandwidth. float32 is for checking. All block sizes use the same entries: a row's bits do not depend
on them either.
"""

_MOST_REGISTERS = {(256, 4): 128}
"""
Limits of registers by padded head size and bytes of a number. Without a limit the assembler chooses
one by itself, and prefers spilling a register or two to running fewer programs at once.
"""


def padded_head_dim(head_dim: int) -> int:
    """Return the width of tiles for a head size: a power of two, at least 64."""
    return max(64, 1 << (head_dim - 1).bit_length())


def decode_tuning(*, head_dim: int, num_kv_heads: int, dtype: torch.dtype) -> DecodeTuning:
    """
    Return the tuning for a model's heads.

    Raises:
        ValueError: The table does not have this head size or number type.
    """
    row = padded_head_dim(head_dim), dtype.itemsize
    found = DECODE_TILES.get(row)
    if found is None:
        raise ValueError(f"head size must be at most 256 and {dtype} of 2 or 4 bytes: {head_dim}")
    tile, num_warps, num_stages = found
    return DecodeTuning(
        tile=tile,
        num_warps=num_warps,
        num_stages=num_stages,
        min_chunk=256,
        max_chunks=32 if num_kv_heads >= 8 else 64,
        max_registers=_MOST_REGISTERS.get(row),
    )


def decode_splits(tuning: DecodeTuning, *, num_rows: int, num_heads: int, num_kv_heads: int) -> int:
    """
    Return the number of programs that share the chunks of a row and key head; a single program
    merges them itself and needs no second launch.
    """
    programs = num_rows * num_kv_heads * programs_per_kv_head(num_heads, num_kv_heads)
    if programs >= _PROGRAMS_WANTED - NUM_MULTIPROCESSORS:
        return 1
    return min(tuning.max_chunks, -(-_PROGRAMS_WANTED // programs))


def programs_per_kv_head(num_heads: int, num_kv_heads: int) -> int:
    """Return the number of programs for one key head's group of query heads."""
    return -(-num_heads // (num_kv_heads * HEADS_PER_PROGRAM))
