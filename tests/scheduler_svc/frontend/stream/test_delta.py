"""Deltas that are encoded by hand, compared with those that protobuf writes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.frontend.stream.delta import OutputDelta, encode_response
from scheduler_svc.frontend.text.output import OutputChunk
from tandem.inference.v1.inference_service_pb2 import GenerateResponse
from tandem.inference.v1.stream_pb2 import Delta
from tandem.link.logprobs import TokenLogprob


class TestEncoding:
    @settings(max_examples=200)
    @given(
        choice=st.integers(0, 15),
        offset=st.one_of(st.integers(0, 300), st.integers(0, 2**31 - 1)),
        ids=st.lists(st.integers(0, 2**31 - 1), max_size=20),
        text=st.text(max_size=20),
        repeat=st.sampled_from([1, 1000]),
    )
    def test_bytes_are_those_of_the_message(self, choice, offset, ids, text, repeat):
        """
        The bytes of a delta are exactly those that protobuf would write, whatever is in it.
        """
        chunk = OutputChunk(offset, ids * repeat, text * repeat)
        message = Delta(
            choice=choice, first_token_offset=offset, token_ids=ids * repeat, text=text * repeat
        )
        expected = GenerateResponse(delta=message).SerializeToString()
        assert expected == encode_response(OutputDelta(choice, chunk))

    def test_log_probabilities_travel_along(self):
        """
        Log probabilities follow the other fields, one entry per token.
        """
        entries = [TokenLogprob(-0.5, [7, 8], [-0.5, -1.25]), TokenLogprob(-2.0, [], [])]
        chunk = OutputChunk(3, [7, 9], "ab", entries)
        sent = encode_response(OutputDelta(1, chunk, str))
        delta = GenerateResponse.FromString(sent).delta
        assert ((1, 3, "ab"), [7, 9]) == (
            (delta.choice, delta.first_token_offset, delta.text),
            list(delta.token_ids),
        )
        assert [(-0.5, [7, 8], [-0.5, -1.25]), (-2.0, [], [])] == [
            (one.logprob, list(one.top_token_ids), list(one.top_logprobs)) for one in delta.logprobs
        ]
        assert [("7", ["7", "8"]), ("9", [])] == [
            (one.text, list(one.top_texts)) for one in delta.logprobs
        ]

    def test_requested_ids_are_told_apart_from_the_likeliest(self):
        """
        The last ids are those that the request named; their log probabilities have a field of
        their own.
        """
        entries = [TokenLogprob(-0.5, [7, 8, 3, 7], [-0.5, -1.25, -9.0, -0.5])]
        sent = encode_response(OutputDelta(1, OutputChunk(3, [7], "a", entries), num_requested=2))
        (one,) = GenerateResponse.FromString(sent).delta.logprobs
        assert ([7, 8], [-0.5, -1.25], [-9.0, -0.5]) == (
            list(one.top_token_ids),
            list(one.top_logprobs),
            list(one.requested_logprobs),
        )

    def test_other_messages_are_written_as_they_are(self):
        """
        A message that is no delta is encoded by protobuf.
        """
        message = GenerateResponse(started={"request_id": "r"})
        assert message.SerializeToString() == encode_response(message)
