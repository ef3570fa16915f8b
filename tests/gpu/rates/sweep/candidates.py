"""
The tunings that a sweep tries for each entry of a table: shapes of tiles first, then, around the
best of these, how work is shared among programs.

All keep to what the kernels' documentation demands: chunks are whole tiles, tiles of short rows
take the largest group that is called short, and a row's arithmetic follows from its own sizes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from kernels.linear.tuning import LinearTiles
from kernels.paged_attention.triton_prefill_tiles import SHORT_ROWS, TileSize
from kernels.paged_attention.tuning import DecodeTuning
from kernels.sampling.tuning import SamplingTiles
from tests.gpu.rates.sweep.tables import Key, Tuning, present

SHARED_BYTES = 227 * 1024
"""Shared memory of a multiprocessor of sm_90 that programs can use."""

_MOST_SUMS = 200
"""Registers of a thread for sums and scores that leave enough of its 255 for all else."""


def first_round(key: Key) -> list[Tuning]:
    """Return the present entry, then other shapes of tiles."""
    now = present(key)
    found: list[Tuning] = [now]
    match now:
        case DecodeTuning():
            found += _decode_tiles(key, now)
        case TileSize():
            found += _prefill_tiles(key)
        case LinearTiles():
            found += _linear_tiles(now)
        case SamplingTiles():
            found += _sampling_tiles()
    return list(dict.fromkeys(found))


def second_round(key: Key, best: Tuning) -> list[Tuning]:
    """Return variants of the first round's best that share the work otherwise."""
    found: list[Tuning] = []
    match best:
        case DecodeTuning():
            per_multiprocessor = best.programs_per_multiprocessor
            found += [
                replace(best, min_chunk=chunk) for chunk in (128, 256, 512) if chunk >= best.tile
            ]
            found += [replace(best, max_chunks=chunks) for chunks in (16, 64)]
            found += [
                replace(best, programs_per_multiprocessor=programs)
                for programs in (per_multiprocessor // 4, per_multiprocessor // 2)
            ]
            found.append(replace(best, min_chunk=512, programs_per_multiprocessor=8))
        case LinearTiles():
            found += [replace(best, most_parts=parts) for parts in (4, 6, 12)]
            found += [replace(best, programs_per_multiprocessor=programs) for programs in (1, 3, 4)]
        case TileSize() | SamplingTiles():
            pass  # tiles are all there is
    return [each for each in dict.fromkeys(found) if each not in {best, present(key)}]


def _decode_tiles(key: Key, now: DecodeTuning) -> list[Tuning]:
    assert isinstance(key.entry, tuple)
    head_dim, itemsize = key.entry
    tiles = (32, 64, 128) if itemsize == 2 else (16, 32)
    return [
        replace(now, tile=tile, num_warps=num_warps, num_stages=num_stages, max_registers=None)
        for tile, num_warps, num_stages in product(tiles, (2, 4, 8), (3, 5, 7))
        # Keys and values of (stages - 1) / 2 tiles are held at once, and a warp has columns of its
        # own to multiply.
        if (num_stages - 1) * tile * head_dim * itemsize <= SHARED_BYTES and 8 * num_warps <= tile
    ]


def _prefill_tiles(key: Key) -> list[Tuning]:
    kinds = {
        "prefill_long": product((64, 128), (32, 64, 128), (4, 8), (2, 3, 5)),
        "prefill_short": product((SHORT_ROWS,), (32, 64, 128), (4, 8), (3, 5)),
        "prefill_invariant": product((16, 32, 64), (32, 64, 128), (4,), (3, 5)),
    }
    head_dim = key.entry
    assert isinstance(head_dim, int)
    return [
        TileSize(rows=rows, keys=keys, num_warps=num_warps, num_stages=num_stages)
        for rows, keys, num_warps, num_stages in kinds[key.operation]
        # Sums and scores lie in registers; above so many of them the compiler spills others.
        if rows * (head_dim + keys) <= _MOST_SUMS * 32 * num_warps
    ]


def _linear_tiles(now: LinearTiles) -> list[Tuning]:
    wide = product((64,), (64, 128, 256), (64, 128), (4,), (3, 4, 5))
    tall = product((128,), (128, 256), (64,), (8,), (3, 4))
    low = product((16, 32), (64, 128), (128,), (4,), (3, 4))
    return [
        replace(
            now,
            rows=rows,
            columns=columns,
            depth=depth,
            num_warps=num_warps,
            num_stages=num_stages,
        )
        for sizes in (wide, tall, low)
        for rows, columns, depth, num_warps, num_stages in sizes
        if (rows + columns) * depth * 2 * (num_stages - 1) <= SHARED_BYTES
    ]


def _sampling_tiles() -> list[Tuning]:
    return [
        SamplingTiles(tile=tile, split=split, num_warps=num_warps)
        for tile, split, num_warps in product((512, 1024, 2048), (2048, 4096, 8192, 16384), (4, 8))
        if tile <= split and (num_warps == 4 or tile > 1024)
    ]
