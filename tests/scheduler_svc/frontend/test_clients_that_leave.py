"""Clients that cancel, time out or do not read, and a core that disappears."""

from collections.abc import Callable

import grpc
import pytest
from msgspec import structs

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.stream.inbox import StreamInbox
from tandem.errors import HandedOver
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.scheduler_svc.frontend.calls import error_of, kinds, rest_of
from tests.scheduler_svc.frontend.fake_core import (
    NEVER_S,
    ended,
    model,
    running_frontend,
    serve,
    until,
    update,
    within,
)

IDS = [5, 6, 7]


def request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids={"ids": IDS}, **fields)


class TestCancel:
    async def test_cancelled_stream_ends_in_the_core(self, frontend, stub):
        """
        Cancelling a running stream tells the core at once and forgets the stream.
        """
        call = stub.Generate(request())
        stream_id = await frontend.core.accept()
        await within(call.read())
        call.cancel()
        told = await within(frontend.core.ends.get())
        assert (stream_id, FinishReason.CANCELLED, None) == (
            told.stream_id,
            told.reason,
            told.num_output_tokens,
        )
        await until(lambda: len(frontend.client.streams) == 0)

    async def test_cancel_before_acceptance_ends_in_the_core(self, frontend, stub):
        """
        A client that leaves while its request waits for acceptance leaves nothing behind.
        """
        call = stub.Complete(pb.CompleteRequest(request=request()))
        submit = await within(frontend.core.submits.get())
        call.cancel()
        assert submit.stream_id == (await within(frontend.core.ends.get())).stream_id

    async def test_call_deadline_cancels(self, frontend, stub):
        """
        A gRPC deadline that passes is a cancellation.
        """
        # A deadline that passes before the core gets the submission proves nothing.
        for timeout_s in (0.5, 5.0, 50.0):
            call = stub.Generate(request(), timeout=timeout_s)
            assert grpc.StatusCode.DEADLINE_EXCEEDED == await within(call.code())
            if not frontend.core.submits.empty():
                break
        submit = frontend.core.submits.get_nowait()
        while (await within(frontend.core.ends.get())).stream_id != submit.stream_id:
            pass

    async def test_late_news_of_a_cancelled_stream_is_ignored(self, frontend, stub):
        """
        Messages of the core about a stream that is gone have no effect on others.
        """
        call = stub.Generate(request())
        gone = await frontend.core.accept()
        call.cancel()
        await within(frontend.core.ends.get())
        end = ended(gone, FinishReason.CANCELLED, 1)
        await frontend.core.tokens(gone, 0, [70], end=end)
        other = stub.Complete(pb.CompleteRequest(request=request()))
        stream_id = await frontend.core.accept()
        assert gone != stream_id
        end = ended(stream_id, FinishReason.MAX_TOKENS, 1)
        await frontend.core.tokens(stream_id, 0, [70], end=end)
        assert [70] == list((await within(other)).completions[0].token_ids)


NUM_FLOOD_TOKENS = 400_000
"""Number of tokens several times what a connection buffers for a client that does not read."""


def arrived(inbox: StreamInbox, num_tokens: int) -> Callable[[], bool]:
    return lambda: inbox.choices[0].num_received >= num_tokens or inbox.slow is not None


class TestSlowClient:
    @pytest.mark.parametrize(
        ("stall_deadline_s", "max_pending_bytes", "sentence"),
        [
            (0.3, 2**30, "a message waited 0.3 s for the client"),
            (NEVER_S, 40_000, "bytes of output wait for the client"),
        ],
        ids=["stall", "bytes"],
    )
    async def test_client_that_does_not_read_ends_alone(
        self, tmp_path, model_dir, stall_deadline_s, max_pending_bytes, sentence
    ):
        """
        A client that does not read ends alone, SLOW_CONSUMER and in the core, past either limit;
        another request goes on.
        """
        async with running_frontend(tmp_path, max_pending_bytes=max_pending_bytes) as frontend:
            await serve(frontend, model(model_dir))
            async with grpc.aio.insecure_channel(
                frontend.servers.address,
                options=(("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)),
            ) as channel:
                stub = InferenceServiceStub(channel)
                slow = stub.Generate(request())
                stream_id = await frontend.core.accept()
                await within(slow.read())
                inbox = next(iter(frontend.client.streams._inboxes.values()))
                await until(lambda: inbox._write_began_s is None)  # gRPC took the first message
                frontend.client.streams._settings = structs.replace(
                    frontend.client.streams._settings, stall_deadline_s=stall_deadline_s
                )
                most_pending = 0
                for sent in range(0, NUM_FLOOD_TOKENS, 4000):
                    await frontend.core.tokens(stream_id, sent, [270] * 4000)
                    await until(arrived(inbox, sent + 4000))
                    most_pending = max(most_pending, inbox.num_pending_bytes)
                assert stream_id == (await within(frontend.core.ends.get())).stream_id
                assert most_pending <= max_pending_bytes + 4 * 4000
                await until(lambda: len(frontend.client.streams) == 0)

                other = InferenceServiceStub(frontend.channel).Complete(
                    pb.CompleteRequest(request=request())
                )
                other_id = await frontend.core.accept()
                end = ended(other_id, FinishReason.MAX_TOKENS, 1)
                await frontend.core.tokens(other_id, 0, [70], end=end)
                assert [70] == list((await within(other)).completions[0].token_ids)

                error = await error_of(slow)
                assert ("SLOW_CONSUMER", "ABORTED") == (error.reason, error.code)
                assert sentence in error.message


class TestCoreGone:
    async def test_lost_core_ends_every_call(self, frontend, stub):
        """
        Live streams and new requests are UNAVAILABLE with retry advice when the core is gone.
        """
        live = stub.Generate(request())
        await frontend.core.accept()
        await within(live.read())
        frontend.client.lose(HandedOver("the scheduler is stopping"))
        for call in (live, stub.Generate(request())):
            error = await error_of(call)
            assert ("HANDED_OVER", "UNAVAILABLE", 1.0) == (
                error.reason,
                error.code,
                error.retry_after_s,
            )

    async def test_stream_that_has_all_is_sent_to_its_end(self, frontend, stub):
        """
        A stream with all its messages from the core is sent to its end when the core is gone.
        """
        call = stub.Generate(request())
        stream_id = await frontend.core.accept()
        await within(call.read())
        end = ended(stream_id, FinishReason.MAX_TOKENS, 1)
        frontend.client._dispatch(update(stream_id, 0, [70], end=end))
        frontend.client.lose(HandedOver("the scheduler is stopping"))
        assert ["delta", "finished", "done"] == kinds(await rest_of(call))
