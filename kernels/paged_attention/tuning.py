"""
Tile shapes and split counts of the Triton kernels of paged attention: a table instead of a search
at run time, so that what a captured graph holds and what a process compiles never depend on chance.

Nothing here depends on the rows of a batch but the number of programs, which changes who computes a
part of a row and not how: see `DecodeTuning`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NUM_MULTIPROCESSORS = 132
"""Of H100 and H200; a program count for other devices is only less well balanced."""

_PROGRAMS_WANTED = 16 * NUM_MULTIPROCESSORS
"""
Five times of what fits at once: rows differ in length, and the end of a launch is not to be left to
a few long ones. Programs without a chunk end at once.
"""

HEADS_PER_PROGRAM = 16
"""
Query heads of one key head that a program of decode attention takes: the least that the matrix
units do. Programs of a larger group follow one another and find its keys in cache.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTuning:
    """
    How decode attention is cut.

    A row's tiles are cut into chunks by its own length alone; each chunk is attended from scratch
    and the chunks are merged first to last. So a row's bits are the same whichever programs compute
    its chunks.

    Attributes:
        tile: Positions whose keys are read together.
        num_warps: Of 32 threads each, per program.
        num_stages: Tiles on their way at once.
        min_chunk: Positions of a chunk of a short row, a multiple of `tile`.
        max_chunks: Of a row; longer rows have longer chunks.
        max_registers: Of a thread; None leaves it to the compiler.
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

Where keys lie is loaded too, so stages come in pairs: 5 hold two tiles of 32 KB, one coming while
the other is used, and 3 programs fill a multiprocessor's shared memory. That is several times what
covers the memory's latency, so that the last programs of a launch still use all of its bandwidth.
float32 is for checking. Block sizes share the rows: a row's bits do not depend on them either.
"""

_MOST_REGISTERS = {(256, 4): 128}
"""
By padded head size and bytes of a number. Without a limit the assembler chooses one by itself, and
rather spills a register or two than let fewer programs run at once.
"""


def padded_head_dim(head_dim: int) -> int:
    """The power of two, at least 64, that tiles of a head size have."""
    return max(64, 1 << (head_dim - 1).bit_length())


def decode_tuning(*, head_dim: int, num_kv_heads: int, dtype: torch.dtype) -> DecodeTuning:
    """
    The cut for a model's heads.

    Raises:
        ValueError: No row of the table has this head size.
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
    How many programs share the chunks of a row and key head; 1 merges them on the way and needs no
    second launch.
    """
    programs = num_rows * num_kv_heads * programs_per_kv_head(num_heads, num_kv_heads)
    if programs >= _PROGRAMS_WANTED - NUM_MULTIPROCESSORS:
        return 1
    return min(tuning.max_chunks, -(-_PROGRAMS_WANTED // programs))


def programs_per_kv_head(num_heads: int, num_kv_heads: int) -> int:
    """Programs that a key head's group of query heads takes."""
    return -(-num_heads // (num_kv_heads * HEADS_PER_PROGRAM))
