"""Intake of messages: large ones are bounded before they cost memory, and others do not wait long."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable

import grpc
import pytest
from google.protobuf.message import DecodeError

from scheduler_svc.frontend.intake import memory
from scheduler_svc.frontend.intake.bounds import MAX_FIELDS, MAX_SINGULAR, check_bounds
from scheduler_svc.frontend.intake.decoding import LARGE_BYTES, MessageIntake
from scheduler_svc.frontend.intake.grpc_options import MAX_METADATA_BYTES
from tandem.errors import InvalidParameter, QueueFull
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import model_pb2
from tests.scheduler_svc.frontend.calls import error_of, stub_of
from tests.scheduler_svc.frontend.fake_core import model, running_frontend, serve, until, within

COMPLETE = pb.CompleteRequest.DESCRIPTOR
EMPTY = b"\x0a\x00"
"""An empty string or message in field 1."""
ONE, OTHER, THIRD = "ipv4:10.0.0.1:1", "ipv4:10.0.0.1:2", "ipv4:10.0.0.3:1"
"""Connections."""


def raw_request(**fields: object) -> bytes:
    return pb.CompleteRequest(request=pb.GenerateRequest(**fields)).SerializeToString()


def refusal_of(raw: bytes) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        check_bounds(raw, COMPLETE)
    return caught.value


def many(fields: pb.GenerateRequest, part: str, raw: bytes) -> bytes:
    """A CompleteRequest whose part has these bytes."""
    getattr(fields, part).MergeFromString(raw)
    return pb.CompleteRequest(request=fields).SerializeToString()


class TestBounds:
    @pytest.mark.parametrize(
        ("part", "most", "field"),
        [
            ("chat", 4096, "request.chat.messages"),
            ("resume", 16, "request.resume.choices"),
        ],
    )
    def test_empty_messages_are_counted(self, part, most, field):
        """
        As many empty messages as a request can have pass, one more is refused with its path.
        """
        check_bounds(many(pb.GenerateRequest(), part, EMPTY * most), COMPLETE)
        assert field == refusal_of(many(pb.GenerateRequest(), part, EMPTY * (most + 1))).field

    def test_strings_and_map_entries_are_counted(self):
        """
        Stop strings and biased ids over their number are refused with their paths.
        """
        stop = refusal_of(raw_request(stopping={"stop": [""] * 17}))
        assert ("request.stopping.stop", True) == (stop.field, "at most 16" in stop.message)
        bias = dict.fromkeys(range(1025), 1.0)
        refused = refusal_of(raw_request(sampling={"logit_bias": bias}))
        assert "request.sampling.logit_bias" == refused.field

    def test_message_that_comes_again_and_again_is_counted(self):
        """
        Parts that merge into one are no way around: each may have only some fields.
        """
        part = raw_request(stopping={"stop": [""] * 16})
        assert "" == refusal_of(part * (MAX_SINGULAR + 1)).field

    def test_unknown_fields_are_counted(self):
        """
        Fields that no contract has count as well.
        """
        assert "" == refusal_of(b"\xf8\x07\x00" * (MAX_SINGULAR + 1)).field

    def test_all_fields_of_a_message_are_counted_together(self):
        """
        Depth is no way around: the sum over all messages is bounded.
        """
        messages = [{"role": "", "content": ""}] * 4096
        chat = pb.GenerateRequest(chat={"messages": messages})
        for message in chat.chat.messages:
            message.MergeFromString(b"\xf8\x07\x00" * (MAX_FIELDS // 4096))
        assert (
            "of the messages in it"
            in refusal_of(pb.CompleteRequest(request=chat).SerializeToString()).message
        )

    def test_longest_prompt_passes(self):
        """
        A million ids in their packed form are one field.
        """
        check_bounds(raw_request(token_ids={"ids": [7] * 1_000_000}), COMPLETE)

    @pytest.mark.parametrize("raw", [b"\xff" * 100, b"\x0a\x7f", b"\x0f", b"\x0a\x05\xff\xff"])
    def test_bytes_that_are_no_message_are_left_to_the_decoder(self, raw):
        """
        Malformed bytes pass here, and the decoder refuses them.
        """
        check_bounds(raw, COMPLETE)
        with pytest.raises(DecodeError):
            pb.CompleteRequest.FromString(raw)


class Decoder:
    """Counts what it decodes; like `FromString` it belongs to a message class."""

    DESCRIPTOR = COMPLETE

    def __init__(self, decode: Callable[[bytes], object] = pb.CompleteRequest.FromString) -> None:
        self._decode = decode
        self.num_decoded = 0

    def decode(self, raw: bytes) -> object:
        self.num_decoded += 1
        return self._decode(raw)


class TestIntake:
    async def test_message_with_too_many_fields_is_never_decoded(self):
        """
        A large message of empty strings is refused without being decoded.
        """
        decoder, raw = Decoder(), raw_request(stopping={"stop": [""] * LARGE_BYTES})
        with pytest.raises(InvalidParameter):
            await MessageIntake().decode(raw, decoder.decode, "Complete", ONE)
        assert 0 == decoder.num_decoded

    async def test_budget_refuses_what_would_wait_with_too_many_bytes(self):
        """
        Of large messages that come together those within the budget are decoded in turn, others get
        QUEUE_FULL with the limit's name and a time; afterwards there is room again.
        """
        raw = raw_request(text="x" * 2 * LARGE_BYTES)
        decoder = Decoder()
        intake = MessageIntake(max_undecoded_bytes=3 * len(raw), connection_share=1)
        calls = [intake.decode(raw, decoder.decode, "Complete", ONE) for _ in range(10)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        refused = [end for end in ends if isinstance(end, QueueFull)]
        assert (7, 3) == (len(refused), decoder.num_decoded)
        assert {("max_undecoded_bytes", True)} == {
            (error.metadata["limit"], error.retry_after_s is not None) for error in refused
        }
        await intake.decode(raw, decoder.decode, "Complete", ONE)

    async def test_connection_with_its_share_leaves_room_for_others(self):
        """
        A connection that sends without end has its share of the budget and gets QUEUE_FULL with the
        limit's name; another one still gets in, and so does a third.
        """
        raw = raw_request(text="x" * 2 * LARGE_BYTES)
        decoder = Decoder()
        intake = MessageIntake(max_undecoded_bytes=12 * len(raw), connection_share=2 / 3)

        async def served(connection: str, count: int) -> tuple[int, set[str]]:
            calls = [
                intake.decode(raw, decoder.decode, "Complete", connection) for _ in range(count)
            ]
            ends = await asyncio.gather(*calls, return_exceptions=True)
            refused = [end for end in ends if isinstance(end, QueueFull)]
            return count - len(refused), {error.metadata["limit"] for error in refused}

        ends = await asyncio.gather(served(ONE, 50), served(OTHER, 50), served(THIRD, 1))
        assert [(8, {"undecoded_share"}), (3, {"undecoded_share"}), (1, set())] == ends
        assert (8, {"undecoded_share"}) == await served(OTHER, 50)

    async def test_share_of_all_is_no_limit_of_a_connection(self):
        """
        With a share of 1 a connection may fill the budget.
        """
        raw = raw_request(text="x" * 2 * LARGE_BYTES)
        decoder = Decoder()
        intake = MessageIntake(max_undecoded_bytes=12 * len(raw), connection_share=1)
        calls = [intake.decode(raw, decoder.decode, "Complete", ONE) for _ in range(12)]
        assert 12 == len(await asyncio.gather(*calls))

    async def test_message_larger_than_the_budget_is_decoded_alone(self):
        """
        The budget refuses no message for its own size.
        """
        raw = raw_request(text="x" * 2 * LARGE_BYTES)
        intake = MessageIntake(max_undecoded_bytes=LARGE_BYTES)
        decoded = await intake.decode(raw, Decoder().decode, "Complete", ONE)
        assert 2 * LARGE_BYTES == len(decoded.request.text)

    async def test_other_work_goes_on_between_large_messages(self):
        """
        The event loop turns at least once for each large message that is decoded.
        """
        raw, turns = raw_request(text="x" * 2 * LARGE_BYTES), 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(turn())
        intake = MessageIntake()
        await asyncio.gather(*(intake.decode(raw, Decoder().decode, "x", ONE) for _ in range(20)))
        other.cancel()
        assert 20 <= turns

    async def test_refused_messages_are_let_go(self, monkeypatch):
        """
        A reference to a refused message, such as its error with the frames that it passed, is
        collected before freed memory is given back.
        """
        monkeypatch.setattr(memory, "DELAY_S", 0.0)

        class Error(DecodeError):
            pass

        held: list[weakref.ref[Error]] = []

        def decode(_raw: bytes) -> object:
            error = Error()
            error.of_cycle = error
            held.append(weakref.ref(error))
            raise error

        gc.disable()
        try:
            with pytest.raises(InvalidParameter):
                await MessageIntake().decode(
                    raw_request(text="x" * 2 * LARGE_BYTES), Decoder(decode).decode, "x", ONE
                )
            await until(lambda: held[0]() is None)
        finally:
            gc.enable()

    async def test_lack_of_memory_is_no_fault_of_the_message(self):
        """
        A decoder without memory is QUEUE_FULL, not a message that is not valid.
        """

        def decode(_raw: bytes) -> object:
            raise DecodeError("Error parsing message with type 'x': Arena alloc failed")

        with pytest.raises(QueueFull) as caught:
            await MessageIntake().decode(b"", decode, "x", ONE)
        assert "memory" == caught.value.metadata["limit"]


class TestOfFrontend:
    async def test_long_id_is_not_logged(self, tmp_path, model_dir, capsys):
        """
        A refused request writes a line of log, however long its id.
        """
        async with running_frontend(tmp_path) as frontend:
            await serve(frontend, model(model_dir))
            capsys.readouterr()
            call = stub_of(frontend).Generate(pb.GenerateRequest(text="a", request_id="i" * 10**6))
            assert "request_id" == (await error_of(call)).field
        said = capsys.readouterr()
        assert "call_failed" in said.out + said.err
        assert 2_000 > len(said.out + said.err)

    async def test_metadata_is_bounded(self, tmp_path, model_dir):
        """
        Metadata over the limit is refused, and the service goes on.
        """
        async with running_frontend(tmp_path) as frontend:
            await serve(frontend, model(model_dir))
            stub = stub_of(frontend)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await within(
                    stub.GetModel(
                        model_pb2.GetModelRequest(), metadata=(("x", "y" * 2 * MAX_METADATA_BYTES),)
                    )
                )
            assert grpc.StatusCode.RESOURCE_EXHAUSTED == caught.value.code()
            assert await within(stub.GetModel(model_pb2.GetModelRequest()))

    async def test_client_holds_back_calls_over_the_streams_of_a_connection(
        self, tmp_path, model_dir
    ):
        """
        A connection takes so many calls at a time; the next one comes when one of them has ended.
        """
        async with running_frontend(tmp_path, max_streams_per_connection=2) as frontend:
            await serve(frontend, model(model_dir))
            stub = stub_of(frontend)
            names = {"one", "two", "three"}
            calls = {
                name: stub.Generate(pb.GenerateRequest(text="a", request_id=name)) for name in names
            }
            first, second = [(await within(frontend.core.submits.get())).request_id for _ in "12"]
            assert frontend.core.submits.empty()
            calls[first].cancel()
            third = (await within(frontend.core.submits.get())).request_id
            assert names == {first, second, third}
            for call in calls.values():
                call.cancel()
