"""Bytes that are written directly, against protobuf's own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.admin.v1.stats_pb2 import GetStatsResponse
from tandem.executor.v1.batch_pb2 import ExecutionBatch, Step
from tandem.link.codec.varint import FIXED64, LENGTH_DELIMITED, VARINT, tag, varint

EDGES = [
    number
    for bits in (7, 14, 21, 28, 35, 63)
    for number in ((1 << bits) - 1, 1 << bits, (1 << bits) + 1)
]


class TestVarint:
    @pytest.mark.parametrize("number", [1, *EDGES, (1 << 64) - 1])
    def test_number_is_written_as_protobuf_writes_it(self, number):
        """
        A tag and a varint are the bytes of a message with that field alone, whatever their length.
        """
        message = Step(step_id=number)
        assert message.SerializeToString() == tag(Step, "step_id", VARINT) + varint(number)

    @settings(max_examples=200, deadline=None)
    @given(st.integers(1, (1 << 64) - 1))
    def test_any_number_is_read_back(self, number):
        """
        Protobuf reads back any number that was written directly.
        """
        assert number == Step.FromString(tag(Step, "step_id", VARINT) + varint(number)).step_id

    def test_zero_is_one_byte(self):
        """
        Zero, which protobuf leaves out, is a byte of zeros.
        """
        assert b"\0" == varint(0)


class TestTag:
    def test_other_wire_types_have_tags_too(self):
        """
        Fields of eight bytes and fields with a length are read back by protobuf.
        """
        fixed = tag(Step, "state_hash", FIXED64) + (5).to_bytes(8, "little")
        assert 5 == Step.FromString(fixed).state_hash
        flags = tag(ExecutionBatch, "row_flags", LENGTH_DELIMITED) + varint(3) + b"\1\2\3"
        assert b"\1\2\3" == ExecutionBatch.FromString(flags).row_flags

    def test_field_with_a_large_number_has_a_longer_tag(self):
        """
        A tag is a varint itself: that of a field past 15 has two bytes.
        """
        suspended = tag(GetStatsResponse, "suspended", VARINT)
        assert 2 == len(suspended)
        assert GetStatsResponse.FromString(suspended + varint(1)).suspended
