"""The hand-written step encoder gives the messages that protobuf would write."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.executor.v1 import batch_pb2
from tandem.link.batch import Batch
from tandem.link.codec.step_encoder import MAX_VERSIONS, StepEncoder
from tandem.link.codec.wire import encode_step
from tandem.link.commands import KvMode, Resume, Step, Suspend
from tests.link.values import admission, ints

NUMBER = st.one_of(
    st.sampled_from([0, 1, 127, 128, 2**14 - 1, 2**14, 2**21, 2**63, 2**64 - 1]),
    st.integers(0, 2**64 - 1),
)
NUMBERS = ("session_epoch", "step_id", "acked_step_id", "state_hash")


def decode_rows(count: int, version: int = 1) -> Batch:
    """Return decode rows under the version that one step hands to the next."""
    return Batch(
        row_slot=np.arange(count, dtype=np.int32),
        row_num_tokens=np.ones(count, np.int32),
        row_flags=np.ones(count, np.uint8),
        row_start=np.arange(7, 7 + count, dtype=np.int32),
        rows_version=version,
    )


def parsed(raw: bytes) -> batch_pb2.ExecuteRequest:
    request = batch_pb2.ExecuteRequest.FromString(raw)
    request.ClearField("crc32")  # it differs: fields may come in another order
    return request


def expected(command: object, numbers: dict[str, int]) -> batch_pb2.ExecuteRequest:
    return parsed(encode_step(Step(command=command, **numbers)))


ONES = dict.fromkeys(NUMBERS, 1)


class TestStepEncoder:
    @settings(max_examples=100, deadline=None)
    @given(
        count=st.sampled_from([1, 2, 31, 32, 127, 128, 300, 5000]),
        num_appends=st.sampled_from([0, 1, 16, 40, 5000]),
        numbers=st.fixed_dictionaries(dict.fromkeys(NUMBERS, NUMBER)),
    )
    def test_repeated_rows_are_the_same_message(self, count, num_appends, numbers):
        """
        A first step of some rows, and each that repeats it, parses like the message that protobuf
        writes, whatever the numbers and lengths.
        """
        encoder, batch = StepEncoder(), decode_rows(count)
        appends = np.arange(num_appends, dtype=np.int32)
        for step in range(3):
            batch = replace(
                batch,
                row_start=batch.row_start + 1,
                append_slot=appends,
                append_block=appends + step,
            )
            assert expected(batch, numbers) == parsed(encoder.encode(batch, **numbers))

    def test_rows_that_change_are_encoded_anew(self):
        """
        Rows under another version, and rows without one, are never taken for those of the last
        step.
        """
        encoder = StepEncoder()
        for count, version in ((3, 1), (5, 2), (3, 1), (4, 3), (0, 4), (4, 3)):
            batch = decode_rows(count, version)
            assert expected(batch, ONES) == parsed(encoder.encode(batch, **ONES))
        for _ in range(2):
            unnumbered = decode_rows(4, version=0)
            assert expected(unnumbered, ONES) == parsed(encoder.encode(unnumbered, **ONES))
            unnumbered.row_slot[0] += 1
            assert expected(unnumbered, ONES) == parsed(encoder.encode(unnumbered, **ONES))

    def test_rows_that_take_turns_are_kept(self):
        """
        Rows of several versions in turn, as of lanes, are each encoded right, and few are kept.
        """
        encoder = StepEncoder()
        for step in range(3):
            for version in range(1, 5):
                batch = decode_rows(2 + version, version)
                batch = replace(batch, row_start=batch.row_start + step)
                assert expected(batch, ONES) == parsed(encoder.encode(batch, **ONES))
        for version in range(5, 5 + 2 * MAX_VERSIONS):
            encoder.encode(decode_rows(3, version), **ONES)
        assert len(encoder._columns) <= MAX_VERSIONS

    @pytest.mark.parametrize(
        "more",
        [
            {"admits": (admission(9, 1, 3, [4]),)},
            {"release_slot": ints(4)},
            {"copy_source": ints(1), "copy_destination": ints(2)},
            {"swap_out_block": ints(1), "swap_out_host": ints(2)},
            {"swap_in_host": ints(1), "swap_in_block": ints(2)},
        ],
        ids=lambda more: next(iter(more)),
    )
    def test_nothing_else_gets_lost(self, more):
        """
        A batch of the same rows with anything more is encoded whole, and the next one without it
        again.
        """
        encoder, batch = StepEncoder(), decode_rows(3)
        for command in (batch, replace(batch, **more), batch):
            assert expected(command, ONES) == parsed(encoder.encode(command, **ONES))

    @pytest.mark.parametrize("command", [Batch(), Suspend(kv_mode=KvMode.OFFLOAD), Resume()])
    def test_other_commands(self, command):
        """
        Empty batches, suspensions and resumptions are encoded as the plain encoder does.
        """
        assert expected(command, ONES) == parsed(StepEncoder().encode(command, **ONES))

    def test_wide_starts_are_refused(self):
        """
        A column that would have to be narrowed raises TypeError, in repeated rows too.
        """
        encoder, batch = StepEncoder(), decode_rows(3)
        encoder.encode(batch, **ONES)
        with pytest.raises(TypeError):
            encoder.encode(replace(batch, row_start=batch.row_start.astype(np.int64)), **ONES)
