"""Shapes of captured steps, and the shape that a batch runs in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.config.graph_sizes import decode_sizes
from executor_svc.step.graphs.shapes import graph_shapes, match


def as_tuples(shapes):
    return [(shape.num_tokens, shape.num_prefills, shape.num_decodes) for shape in shapes]


def shapes_of(max_requests, count, mixed, *, max_len=2560, captures_prefills=True):
    return graph_shapes(
        decode_sizes(count, max_requests),
        max_requests=max_requests,
        max_sequence_length=max_len,
        mixed_prefill_count=mixed,
        captures_prefills=captures_prefills,
    )


class TestGoldens:
    def test_mixed_list_is_megatrons(self):
        """
        With 16 prefills in mixed steps there are steps of prefills alone, of both kinds and of
        decodes alone, most prefilled tokens first.
        """
        assert [
            (64, 64, 0),
            (48, 48, 0),
            (32, 32, 0),
            (64, 16, 48),
            (48, 16, 32),
            (32, 16, 16),
            (16, 16, 0),
            (64, 0, 64),
            (48, 0, 48),
            (32, 0, 32),
            (16, 0, 16),
        ] == as_tuples(shapes_of(64, 4, 16))

    @pytest.mark.parametrize(("mixed", "captures_prefills"), [(0, True), (None, True), (16, False)])
    def test_without_prefills_only_decodes_are_captured(self, mixed, captures_prefills):
        """
        No mixed prefills, or the switch off, leaves steps of decodes alone.
        """
        found = as_tuples(shapes_of(64, 4, mixed, captures_prefills=captures_prefills))
        assert [(64, 0, 64), (48, 0, 48), (32, 0, 32), (16, 0, 16)] == found

    def test_long_prefills_need_fewer_rows_than_tokens(self):
        """
        A shape that could never be full is not captured: rows times the longest sequence bound its
        tokens.
        """
        shapes = graph_shapes([64], max_requests=8, max_sequence_length=4, mixed_prefill_count=2)
        assert [] == as_tuples(shapes)


class TestMatch:
    SHAPES = shapes_of(64, 4, 16)

    @pytest.mark.parametrize(
        ("real", "expected"),
        [
            ((1, 0, 1), (16, 0, 16)),
            ((16, 0, 16), (16, 0, 16)),
            ((17, 0, 17), (32, 0, 32)),
            ((5, 1, 3), (16, 16, 0)),
            ((40, 1, 20), (48, 16, 32)),
            ((40, 17, 20), (48, 48, 0)),
            ((65, 1, 2), None),
            ((65, 0, 65), None),
        ],
    )
    def test_batch_gets_the_smallest_shape(self, real, expected):
        """
        Decodes alone stay among themselves; else decodes may use the room of prefills; what fits
        nowhere runs eagerly.
        """
        tokens, prefills, decodes = real
        found = match(
            self.SHAPES,
            num_tokens=tokens,
            num_prefills=prefills,
            num_decodes=decodes,
        )
        assert expected == (None if found is None else as_tuples([found])[0])

    @given(data=st.data())
    def test_smallest_covering_shape_by_exhaustion(self, data):
        """
        The shape found for a batch covers it with no negative padding, no smaller captured shape
        covers it, and one is found whenever one covers it.
        """
        max_requests, max_len = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 64))
        count = data.draw(st.sampled_from([-1, 1, 2, 4, 9]))
        mixed = data.draw(st.sampled_from([None, 1, 3, 16]))
        shapes = shapes_of(max_requests, count, mixed, max_len=max_len)
        rows = data.draw(st.integers(1, max_requests))
        prefill_lens = data.draw(st.lists(st.integers(1, max_len), max_size=rows))
        prefills, decodes = len(prefill_lens), rows - len(prefill_lens)
        tokens = sum(prefill_lens) + decodes
        found = match(shapes, num_tokens=tokens, num_prefills=prefills, num_decodes=decodes)
        covering = [shape for shape in shapes if covers(shape, tokens, prefills, decodes)]
        if found is None:
            assert [] == covering
        else:
            assert min(as_tuples(covering)) == as_tuples([found])[0]
            assert found.num_tokens - tokens >= 0
            assert found.num_rows - rows >= 0

    @given(max_requests=st.integers(1, 300), count=st.sampled_from([-1, 1, 3, 8, 50]))
    def test_every_number_of_decodes_has_a_graph(self, max_requests, count):
        """
        A step of decodes alone always fits, up to the most requests.
        """
        shapes = shapes_of(max_requests, count, None)
        for rows in {1, (max_requests + 1) // 2, max_requests}:
            assert match(shapes, num_tokens=rows, num_prefills=0, num_decodes=rows) is not None


def covers(shape, tokens, prefills, decodes):
    """
    Return whether each row can be given room: decodes take their own first, then that of prefills.
    """
    if prefills == 0 and shape.num_prefills:
        return False
    overflow = max(0, decodes - shape.num_decodes)
    return tokens <= shape.num_tokens and prefills + overflow <= shape.num_prefills
