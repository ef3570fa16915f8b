"""The step link's encoding: it loses nothing, and malformed bytes have one outcome."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.errors import CorruptMessage, SessionLost
from tandem.executor.v1 import batch_pb2, result_pb2
from tandem.link.batch import Batch
from tandem.link.codec import fields
from tandem.link.codec.checksum import FIELD_NUMBER, seal
from tandem.link.codec.wire import (
    decode_request,
    decode_response,
    encode_attach,
    encode_response,
    encode_step,
)
from tests.link.values import (
    ATTACHES,
    RESPONSES,
    STEPS,
    admission,
    flags,
    ints,
    result,
    rows,
    same,
    step,
)

QUICK = settings(max_examples=60, deadline=None)


def request_of(**batch: object) -> bytes:
    """Return a request with one batch of raw fields."""
    message = batch_pb2.ExecuteRequest()
    message.step.batch.CopyFrom(batch_pb2.ExecutionBatch(**batch))
    return message.SerializeToString()


def admit_of(**changes: object) -> bytes:
    """Return a request that admits one row, well-formed but for the changes."""
    usual = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
    sampling = {**usual, **changes.pop("sampling", {})}
    row = batch_pb2.AdmittedRow(sampling=batch_pb2.RowSampling(**sampling), **changes)
    return request_of(admit=[row])


def result_of(**changes: object) -> bytes:
    """Return a response with one result of raw fields."""
    message = result_pb2.ExecuteResponse()
    message.result.CopyFrom(result_pb2.ExecutionResult(**changes))
    return message.SerializeToString()


def logprobs_of(**columns: bytes) -> bytes:
    """Return a response with the log probabilities of a result without rows."""
    return result_of(logprobs=result_pb2.LogprobColumns(**columns))


def prompt_logprobs_of(**columns: bytes) -> bytes:
    """Return a response with log probabilities of prompt tokens."""
    return result_of(prompt_logprobs=result_pb2.PromptLogprobColumns(**columns))


class TestRoundTrip:
    @QUICK
    @given(STEPS)
    def test_step_arrives_as_it_was_sent(self, value):
        """
        Every field of a step, the types of its columns included, survives encoding.
        """
        assert same(value, decode_request(encode_step(value)))

    @QUICK
    @given(ATTACHES)
    def test_attach_arrives_as_it_was_sent(self, value):
        """
        Every field of an attach survives encoding.
        """
        assert value == decode_request(encode_attach(value))

    @QUICK
    @given(RESPONSES)
    def test_response_arrives_as_it_was_sent(self, value):
        """
        Every field of a message up the link survives encoding.
        """
        assert same(value, decode_response(encode_response(value)))

    @QUICK
    @given(STEPS)
    def test_encoding_is_repeatable(self, value):
        """
        Equal steps have equal bytes.
        """
        assert encode_step(value) == encode_step(value)

    def test_empty_batch_is_a_batch(self):
        """
        A batch without any content arrives as a batch, not as a step without a command.
        """
        assert isinstance(decode_request(encode_step(step(1))).command, Batch)

    def test_step_without_a_graph_says_nothing_of_graphs(self):
        """
        graph_num_tokens is set only where a captured graph ran.
        """
        for graph, is_set in ((0, False), (64, True)):
            message = result_pb2.ExecuteResponse.FromString(
                encode_response(replace(result(1), graph=graph))
            )
            assert is_set is message.result.HasField("graph_num_tokens")
            assert graph == message.result.graph_num_tokens

    def test_columns_are_little_endian(self):
        """
        A column's bytes are little-endian, whatever the machine.
        """
        batch = Batch(release_slot=ints(1, 258))
        raw = encode_step(step(1, command=batch))
        assert b"\x01\x00\x00\x00\x02\x01\x00\x00" in raw

    def test_strided_column_is_sent_whole(self):
        """
        A column that is a view with gaps is sent as its values.
        """
        table = np.arange(12, dtype=np.int32).reshape(4, 3)
        value = Batch(release_slot=table[:, 1])
        sent = encode_step(step(1, command=value))
        assert [1, 4, 7, 10] == decode_request(sent).command.release_slot.tolist()

    def test_wide_column_is_refused(self):
        """
        A column of int64 raises TypeError at the sender instead of being narrowed silently.
        """
        wide = Batch(release_slot=np.arange(3, dtype=np.int64))
        with pytest.raises(TypeError, match="int64"):
            encode_step(step(1, command=wide))


class TestMalformed:
    @pytest.mark.parametrize(
        ("raw", "field"),
        [
            (request_of(row_slot=b"\0\0\0"), "step.batch.row_slot"),
            (request_of(row_slot=b"\0" * 4), "step.batch.row_num_tokens"),
            (request_of(row_slot=b"\0" * 4, row_num_tokens=b"\0" * 4), "step.batch.row_start"),
            (
                request_of(row_slot=b"\0" * 4, row_num_tokens=b"\0" * 4, row_start=b"\0" * 4),
                "step.batch.row_flags",
            ),
            (request_of(append_slot=b"\0" * 4), "step.batch.append_block"),
            (request_of(copy_destination=b"\0" * 4), "step.batch.copy_destination"),
            (request_of(swap_out_host=b"\0" * 4), "step.batch.swap_out_host"),
            (request_of(swap_in_block=b"\0" * 4), "step.batch.swap_in_block"),
            (request_of(release_slot=b"\0" * 5), "step.batch.release_slot"),
            (admit_of(token_ids=b"\0"), "step.batch.admit[0].token_ids"),
            (admit_of(block_ids=b"\0"), "step.batch.admit[0].block_ids"),
            (admit_of(slot=2**31), "step.batch.admit[0].slot"),
            (request_of(admit=[batch_pb2.AdmittedRow()]), "step.batch.admit[0].sampling.top_p"),
            (admit_of(sampling={"top_p": 1.5}), "step.batch.admit[0].sampling.top_p"),
            (admit_of(sampling={"top_p": float("nan")}), "step.batch.admit[0].sampling.top_p"),
            (admit_of(sampling={"top_k": 2**31}), "step.batch.admit[0].sampling.top_k"),
            (
                admit_of(sampling={"temperature": -1.0}),
                "step.batch.admit[0].sampling.temperature",
            ),
            (
                admit_of(sampling={"temperature": float("inf")}),
                "step.batch.admit[0].sampling.temperature",
            ),
            (admit_of(sampling={"temperature": 2.5}), "step.batch.admit[0].sampling.temperature"),
            (
                admit_of(sampling={"frequency_penalty": 2.5}),
                "step.batch.admit[0].sampling.frequency_penalty",
            ),
            (
                admit_of(sampling={"repetition_penalty": 0.0}),
                "step.batch.admit[0].sampling.repetition_penalty",
            ),
            (
                admit_of(sampling={"frequency_penalty": float("nan")}),
                "step.batch.admit[0].sampling.frequency_penalty",
            ),
            (
                admit_of(sampling={"presence_penalty": float("inf")}),
                "step.batch.admit[0].sampling.presence_penalty",
            ),
            (admit_of(sampling={"min_p": 1.5}), "step.batch.admit[0].sampling.min_p"),
            (admit_of(sampling={"min_tokens": 2**31}), "step.batch.admit[0].sampling.min_tokens"),
            (admit_of(sampling={"end_ids": b"\0"}), "step.batch.admit[0].sampling.end_ids"),
            (admit_of(sampling={"bias_ids": b"\0" * 4}), "step.batch.admit[0].sampling.bias"),
            (
                admit_of(sampling={"bias_ids": b"\0" * 8, "bias": b"\0" * 8}),
                "step.batch.admit[0].sampling.bias_ids",
            ),
            (
                admit_of(sampling={"bias_ids": b"\0" * 4, "bias": b"\0\0\x80\x7f"}),
                "step.batch.admit[0].sampling.bias",
            ),
            (admit_of(sampling={"logprobs": 21}), "step.batch.admit[0].sampling.logprobs"),
            (
                admit_of(sampling={"prompt_logprobs": 21}),
                "step.batch.admit[0].sampling.prompt_logprobs",
            ),
            (b"", "message"),
            (batch_pb2.ExecuteRequest(step=batch_pb2.Step()).SerializeToString(), "step.command"),
            (
                batch_pb2.ExecuteRequest(
                    step=batch_pb2.Step(suspend=batch_pb2.Suspend())
                ).SerializeToString(),
                "step.suspend.kv_mode",
            ),
            (b"\xff", "ExecuteRequest"),
        ],
        ids=lambda value: value if isinstance(value, str) else "raw",
    )
    def test_bad_request_is_named(self, raw, field):
        """
        A malformed message down the link ends the session and names its field.
        """
        with pytest.raises(SessionLost) as error:
            decode_request(seal(raw))
        assert field == error.value.metadata["field"]
        assert field in error.value.message

    @pytest.mark.parametrize(
        ("raw", "field"),
        [
            (result_of(slot=b"\0"), "result.slot"),
            (result_of(slot=b"\0" * 4), "result.generation"),
            (result_of(slot=b"\0" * 4, generation=b"\0" * 4), "result.position"),
            (
                result_of(slot=b"\0" * 4, generation=b"\0" * 4, position=b"\0" * 4),
                "result.token",
            ),
            (result_of(margin=b"\0" * 4), "result.margin"),
            (logprobs_of(row=b"\0" * 4), "result.logprobs.chosen"),
            (logprobs_of(), "result.logprobs.top_start"),
            (logprobs_of(top_start=b"\0" * 4, top=b"\0" * 4), "result.logprobs.top"),
            (logprobs_of(top_start=b"\1\0\0\0"), "result.logprobs.top_start"),
            (
                logprobs_of(row=b"\0" * 4, chosen=b"\0" * 4, top_start=b"\0" * 8),
                "result.logprobs.row",
            ),
            (prompt_logprobs_of(slot=b"\0" * 4), "result.prompt_logprobs.generation"),
            (prompt_logprobs_of(chosen=b"\0" * 4), "result.prompt_logprobs.chosen"),
            (prompt_logprobs_of(), "result.prompt_logprobs.top_start"),
            (prompt_logprobs_of(top_start=b"\1\0\0\0"), "result.prompt_logprobs.top_start"),
            (result_of(row_errors=[result_pb2.RowError()]), "result.row_errors[0].kind"),
            (b"", "message"),
            (b"\xff", "ExecuteResponse"),
        ],
        ids=lambda value: value if isinstance(value, str) else "raw",
    )
    def test_bad_response_is_named(self, raw, field):
        """
        A malformed message up the link ends the session and names its field.
        """
        with pytest.raises(SessionLost) as error:
            decode_response(seal(raw))
        assert field == error.value.metadata["field"]

    def test_huge_message_is_refused_unread(self, monkeypatch):
        """
        A message over the size limit is refused before it is parsed.
        """
        monkeypatch.setattr(fields, "MAX_MESSAGE_BYTES", 10)
        with pytest.raises(SessionLost, match="at most 10"):
            decode_request(encode_step(step(1, state_hash=2**64 - 1)))

    def test_too_many_admissions_are_refused(self, monkeypatch):
        """
        A batch with more admissions than any executor has slots is refused.
        """
        monkeypatch.setattr("tandem.link.codec.batch_codec.MAX_ADMITTED_ROWS", 1)
        row = batch_pb2.AdmittedRow(sampling=batch_pb2.RowSampling(top_p=1.0))
        with pytest.raises(SessionLost, match="admit has 2 rows"):
            decode_request(seal(request_of(admit=[row, row])))


def outcome(decode: object, raw: bytes) -> str:
    """Return "decoded", or "lost" on SessionLost; let any other error escape."""
    try:
        decode(raw)
    except SessionLost:
        return "lost"
    return "decoded"


class TestGarbage:
    @settings(max_examples=300, deadline=None)
    @given(st.binary(max_size=200))
    @example(b"\x0a\x03\x0a\x01\xff")
    def test_any_bytes_decode_or_lose_the_session(self, raw):
        """
        Arbitrary bytes under a right checksum either decode or raise SessionLost, both ways.
        """
        outcomes = {outcome(decode, seal(raw)) for decode in (decode_request, decode_response)}
        assert outcomes <= {"decoded", "lost"}

    @settings(max_examples=300, deadline=None)
    @given(st.binary(max_size=200))
    def test_bytes_without_checksum_are_corrupt(self, raw):
        """
        Bytes that do not end with their checksum are a corrupt message, both ways.
        """
        for decode in (decode_request, decode_response):
            with pytest.raises(CorruptMessage):
                decode(raw)

    @settings(max_examples=300, deadline=None)
    @given(st.data())
    def test_any_damage_is_noticed(self, data):
        """
        Messages with bytes changed, cut off or inserted on the way are corrupt; the same damage
        done before the checksum was made either decodes or raises SessionLost.
        """
        batch = Batch(
            admits=(admission(1, 2, 5, [3, 4]),),
            **rows((0, 1, 1, 1), (1, 0, 5, 1)),
            release_slot=ints(2),
        )
        request = encode_step(step(1, command=batch))
        response = encode_response(result(3))
        for decode, raw in ((decode_request, request), (decode_response, response)):
            bare = raw[:-5]
            damaged = bytearray(raw)
            for _ in range(data.draw(st.integers(1, 4))):
                start = data.draw(st.integers(0, len(damaged)))
                length = data.draw(st.integers(0, 3))
                damaged[start : start + length] = data.draw(st.binary(max_size=3))
            if bytes(damaged) != raw:
                with pytest.raises(CorruptMessage):
                    decode(bytes(damaged))
            assert raw == seal(bare)
            assert outcome(decode, seal(bytes(damaged))) in {"decoded", "lost"}

    def test_checksum_is_the_field_of_the_contract(self):
        """
        The checksum that is appended is field `crc32` of both messages.
        """
        for message in (batch_pb2.ExecuteRequest, result_pb2.ExecuteResponse):
            assert FIELD_NUMBER == message.DESCRIPTOR.fields_by_name["crc32"].number
            sealed = seal(message().SerializeToString())
            assert int.from_bytes(sealed[-4:], "little") == message.FromString(sealed).crc32

    def test_flags_column_is_bytes(self):
        """
        Row flags travel as one byte per row.
        """
        batch = Batch(**rows((0, 0, 1, 1), (1, 0, 2, 0)))
        raw = encode_step(step(1, command=batch))
        assert same(flags(1, 0), decode_request(raw).command.row_flags)
