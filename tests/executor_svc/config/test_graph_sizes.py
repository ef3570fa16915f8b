"""Sizes of captured steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.config.graph_sizes import decode_sizes, default_sizes, graph_sizes
from tandem.errors import InvalidConfig

MAX_REQUESTS = st.integers(1, 1200)


class TestGoldens:
    """Megatron Core's lists, as (ranks, number asked for, most requests)."""

    @pytest.mark.parametrize(
        ("tp_size", "count", "max_requests", "sizes"),
        [
            (1, 8, 64, [64, 56, 48, 40, 32, 24, 16, 8]),
            (1, 16, 100, [100, 96, 88, 80, 72, 64, 56, 48, 40, 32, 24, 16, 8]),
            (1, 3, 20, [20, 16, 8]),
            (2, 4, 1000, [1000, 768, 512, 256]),
            (4, -1, 20, [20, 16, 8, 4]),
            (1, 1, 64, [64]),
            (1, 1000, 4, [4]),
            (8, 1, 100, [96]),
        ],
        ids=lambda value: "-" if isinstance(value, list) else str(value),
    )
    def test_number_gives_the_list(self, tp_size, count, max_requests, sizes):
        """
        A number of graphs divides the largest size into steps that are multiples of eight.
        """
        assert sizes == list(decode_sizes(count, max_requests, tp_size))

    def test_dense_list_is_that_of_the_definition(self):
        """
        -1 gives 1, 2, 4, every eighth size to 248, every sixteenth from 256 and the largest.
        """
        expected = sorted({1, 2, 4, *range(8, 249, 8), 256, 272, 288, 300}, reverse=True)
        assert expected == list(decode_sizes(-1, 300))

    def test_default_list_has_few_sizes_for_many_rows(self):
        """
        The default list has 29 sizes of up to 512 rows, and one more where the largest is another.
        """
        sizes = default_sizes(512)
        assert 29 == len(sizes)
        assert [512, 448, 384, 320, 256] == list(sizes[:5])
        assert [24, 16, 8, 6, 4, 3, 2, 1] == list(sizes[-8:])
        assert sizes == default_sizes(2000)
        assert (100, 96, 80) == default_sizes(100)[:3]


class TestEveryList:
    @given(st.sampled_from(["default", -1, *range(1, 40)]), MAX_REQUESTS, st.integers(1, 8))
    def test_lists_descend_in_multiples_up_to_the_largest(self, count, max_requests, tp_size):
        """
        Sizes are distinct, largest first, multiples of the number of ranks, and the largest is the
        most that the ranks can share, or by default 512, rounded up to a multiple.
        """
        max_requests = max(max_requests, tp_size)
        sizes = graph_sizes(count, max_requests, tp_size)
        assert sorted(set(sizes), reverse=True) == list(sizes)
        assert all(size > 0 and size % tp_size == 0 for size in sizes)
        most = max_requests - max_requests % tp_size
        if count == "default" and max_requests > 512:
            assert 512 <= sizes[0] < 512 + tp_size
        else:
            assert most == sizes[0]

    @given(st.data())
    def test_default_padding_is_bounded(self, data):
        """
        Without a choice a step has at most 7 rows of padding up to 64 rows, 15 up to 256 and 63
        beyond.
        """
        max_requests = data.draw(MAX_REQUESTS)
        num_rows = data.draw(st.integers(1, min(max_requests, 512)))
        fitting = min(size for size in default_sizes(max_requests) if size >= num_rows)
        bound = 7 if num_rows <= 64 else 15 if num_rows <= 256 else 63
        assert 0 <= fitting - num_rows <= bound


class TestMistakes:
    @pytest.mark.parametrize("count", [0, -2, -100])
    def test_number_below_one_is_refused(self, count):
        """
        Only -1 and numbers from 1 on name a list; the message is Megatron Core's.
        """
        with pytest.raises(InvalidConfig) as refused:
            decode_sizes(count, 64)
        assert f"num_cuda_graphs must be >= 1, got {count}" == refused.value.message

    def test_no_graphs_have_no_sizes(self):
        """
        "none" gives no sizes.
        """
        assert () == graph_sizes("none", 64)

    def test_more_ranks_than_rows_are_refused(self):
        """
        A step cannot have fewer rows than ranks.
        """
        with pytest.raises(ValueError, match="4 ranks cannot share steps of at most 3 rows"):
            default_sizes(3, 4)
