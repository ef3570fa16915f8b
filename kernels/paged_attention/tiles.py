"""
The parts that one step's attention is cut into on a CPU: tiles of a few queries of one row, and
groups of tiles that run together.

A tile's keys are those that its queries may see. Tiles of similar size form a group, padded to its
largest tile; a group's keys fit the processor's cache. Padding repeats a tile's last query and last
key, so that it holds only the row's own values and a masked score is never a NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.paged_attention.sequences import PagedSequences

QUERIES_PER_TILE = 64
"""Most queries of a tile. Fewer would cost calls, more would cost work on keys that are masked."""

IntColumn = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tiles:
    """
    Columns of tiles, shape ``[N]`` each.

    `row` is the row in the batch. `first_query`, among all queries, and `first_position`, in the
    sequence, are those of the first of its `num_queries` queries. `first_key` and `num_keys` are
    the positions that the queries may see; the first is the first of a block.
    """

    row: IntColumn
    first_query: IntColumn
    num_queries: IntColumn
    first_position: IntColumn
    first_key: IntColumn
    num_keys: IntColumn

    def __len__(self) -> int:
        return len(self.row)

    def select(self, which: slice | IntColumn) -> Tiles:
        """Return some of the tiles."""
        return Tiles(
            self.row[which],
            self.first_query[which],
            self.num_queries[which],
            self.first_position[which],
            self.first_key[which],
            self.num_keys[which],
        )


def cut_tiles(sequences: PagedSequences, window: int | None, block_size: int) -> Tiles:
    """Cut every row into tiles of at most QUERIES_PER_TILE queries."""
    query_len = sequences.query_len.astype(np.int64)
    first_query = np.cumsum(query_len) - query_len
    first_position = sequences.seq_len - query_len
    row = np.arange(len(query_len))
    num_queries = query_len
    if len(query_len) and query_len.max() > QUERIES_PER_TILE:
        tiles_of_row = -(-query_len // QUERIES_PER_TILE)
        row = np.repeat(row, tiles_of_row)
        place = np.arange(len(row)) - np.repeat(
            np.cumsum(tiles_of_row) - tiles_of_row, tiles_of_row
        )
        done = place * QUERIES_PER_TILE
        num_queries = np.minimum(QUERIES_PER_TILE, query_len[row] - done)
        first_query = first_query[row] + done
        first_position = first_position[row] + done
    first_key = np.zeros_like(first_position)
    if window is not None:
        first_key = np.maximum(0, first_position - window + 1) // block_size * block_size
    num_keys = first_position + num_queries - first_key
    return Tiles(row, first_query, num_queries, first_position, first_key, num_keys)


def group_tiles(tiles: Tiles, keys_per_group: int) -> Iterator[Tiles]:
    """
    Split tiles into groups of similar size, with at most `keys_per_group` keys after padding unless
    one tile has more.

    Within a group the smallest tile has at least half the queries and half the keys of the largest.
    """
    bucket = np.ceil(np.log2(tiles.num_queries)).astype(np.int64)
    ordered = tiles.select(np.lexsort((-tiles.num_keys, -bucket)))
    bucket = np.sort(bucket)[::-1]
    edges = np.flatnonzero(np.diff(bucket)) + 1
    for begin, end in zip([0, *edges.tolist()], [*edges.tolist(), len(tiles)], strict=True):
        num_keys = ordered.num_keys[begin:end]
        start = 0
        while start < end - begin:
            most = int(num_keys[start])
            room = max(1, keys_per_group // most)
            like = int(np.searchsorted(-num_keys[start:], -most // 2, side="right"))
            stop = start + min(room, like)
            yield ordered.select(slice(begin + start, begin + stop))
            start = stop


def query_places(tiles: Tiles) -> IntColumn:
    """Return the places of a group's queries, padded, ``[B * Q]``."""
    padded = np.arange(tiles.num_queries.max())
    in_tile = np.minimum(padded, tiles.num_queries[:, None] - 1)
    places: IntColumn = (tiles.first_query[:, None] + in_tile).reshape(-1)
    return places


def key_places(tiles: Tiles, block_table: NDArray[np.int32], block_size: int) -> IntColumn:
    """Return the cache positions of a group's keys, padded, ``[B * L]``."""
    most = int(tiles.num_keys.max())
    num_blocks = -(-most // block_size)
    last_key = tiles.first_key + tiles.num_keys - 1
    index = tiles.first_key[:, None] // block_size + np.arange(num_blocks)
    np.minimum(index, last_key[:, None] // block_size, out=index)
    first_of_block = block_table[tiles.row[:, None], index].astype(np.int64) * block_size
    places = first_of_block[:, :, None] + np.arange(block_size)
    places = places.reshape(len(tiles), -1)[:, :most]
    padding = np.arange(most) >= tiles.num_keys[:, None]
    last_place = (
        block_table[tiles.row, last_key // block_size].astype(np.int64) * block_size
        + last_key % block_size
    )
    return np.where(padding, last_place[:, None], places).reshape(-1)


def visible(tiles: Tiles, window: int | None) -> NDArray[np.bool_] | None:
    """Return the mask of keys that a group's queries see, ``[B, Q, L]``; None if all see all."""
    most = int(tiles.num_keys.max())
    in_tile = np.minimum(np.arange(tiles.num_queries.max()), tiles.num_queries[:, None] - 1)
    query_at = (tiles.first_position[:, None] + in_tile)[:, :, None]
    key_at = (tiles.first_key[:, None] + np.arange(most))[:, None, :]
    seen = key_at <= query_at
    if window is not None:
        seen &= key_at > query_at - window
    return None if seen.all() else seen
