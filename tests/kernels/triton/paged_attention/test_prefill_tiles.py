"""Tiles that prompts' chunks are cut into."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged_attention import PagedSequences
from kernels.paged_attention.triton_prefill_tiles import cut_prefill, tile_size
from tests.kernels.test_paged_attention import shape


def batch(lengths: list[tuple[int, int]]) -> PagedSequences:
    return PagedSequences(
        query_len=np.array([query for query, _ in lengths], np.int32),
        seq_len=np.array([query + context for query, context in lengths], np.int32),
        block_table=np.zeros((len(lengths), 100), np.int32),
    )


class TestCutPrefill:
    @settings(max_examples=60)
    @given(
        st.lists(st.tuples(st.integers(1, 300), st.integers(0, 900)), min_size=1, max_size=8),
        st.integers(1, 12),
        st.data(),
    )
    def test_every_query_of_the_rows_is_in_one_tile(self, lengths, group_size, data):
        """
        Tiles hold each query of the chosen rows once, at its position, and no more rows than their size.
        """
        sequences = batch(lengths)
        chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True))
        of = shape(group_size, 1, 64, 16, torch.bfloat16)
        first = np.cumsum(sequences.query_len) - sequences.query_len
        expected = {
            (row, int(first[row]) + query, lengths[row][1] + query)
            for row in chosen
            for query in range(lengths[row][0])
        }
        seen: list[tuple[int, int, int]] = []
        for size, tiles in cut_prefill(sequences, of, np.array(chosen, np.int64)):
            for row, query, position, count in tiles.tolist():
                assert 1 <= count <= size.rows // group_size
                seen += [(row, query + each, position + each) for each in range(count)]
        assert len(seen) == len(expected)
        assert set(seen) == expected

    def test_tiles_with_most_keys_come_first(self):
        """
        Programs with the most work start first, so that none of them runs alone at the end.
        """
        of = shape(4, 1, 64, 16, torch.bfloat16)
        [(_, tiles)] = cut_prefill(batch([(100, 0), (80, 500)]), of, np.arange(2))
        assert sorted(tiles[:, 2].tolist(), reverse=True) == tiles[:, 2].tolist()

    def test_cut_of_a_row_depends_on_the_row_alone(self):
        """
        A row's tiles are of the same size and at the same positions in any batch.
        """
        of = shape(4, 1, 128, 16, torch.bfloat16)
        lengths = [(10, 7), (300, 0), (17, 400), (16, 3)]
        together = cut_prefill(batch(lengths), of, np.arange(4))
        for row, length in enumerate(lengths):
            [(size, alone)] = cut_prefill(batch([length]), of, np.arange(1))
            tiles = next(tiles for found, tiles in together if found == size)
            assert alone[:, 2:].tolist() == tiles[tiles[:, 0] == row, 2:].tolist()


class TestTileSize:
    @pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 257), (258, 64)])
    def test_heads_that_fit_no_tile_are_refused(self, num_heads: int, head_dim: int):
        """
        Wider heads or larger groups than the kernel takes are an error that says so.
        """
        of = shape(num_heads, 2, head_dim, 16, torch.bfloat16)
        with pytest.raises(ValueError, match=f"got {head_dim} and {num_heads // 2}"):
            tile_size(of, is_short=True)

    def test_other_number_types_are_refused(self):
        """
        A type that the kernel was not made for is an error that names it.
        """
        with pytest.raises(ValueError, match=r"float32: torch.float64"):
            tile_size(shape(dtype=torch.float64), is_short=True)
