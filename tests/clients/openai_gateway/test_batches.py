"""Requests that share a call to their scheduler, and those that cannot."""

from __future__ import annotations

import asyncio
import gc

import grpc
import grpc.aio
import httpx
import pytest

from tandem.errors import QueueFull
from tandem.inference.v1 import batch_pb2, stream_pb2
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from tandem.status import from_rpc_error
from tandem_client.many.items import MAX_SHARED_BYTES
from tandem_openai_gateway.scheduler_calls.batch_call import (
    STATUS_LOST,
    BatchCall,
)
from tests.clients.python.fake_server import ANSWER, PATIENCE_S, Act
from tests.waiting import wait_until

BODY = {"model": "fake", "prompt": "hi"}
STREAMED = BODY | {"stream": True}


def texts_of(answer):
    return answer.json()["choices"][0]["text"]


def hanging_stream(url):
    return httpx.stream("POST", f"{url}/v1/completions", json=STREAMED, trust_env=False)


class TestSharedCall:
    def test_requests_at_the_same_time_share_one(self, url, http, server):
        """
        A request that comes while another one runs is an item of the same batch.
        """
        server.play(Act(num_tokens=3, hang=True), Act())
        with hanging_stream(url):
            assert server.seen.hanging.wait(PATIENCE_S)
            assert ANSWER == texts_of(http.post("/v1/completions", json=BODY))
        assert 2 == len(server.seen.generate)
        assert 1 == server.seen.num_batches

    def test_one_that_leaves_does_not_disturb_others(self, url, http, server):
        """
        A client that leaves ends its own item; the other stream of the batch goes on.
        """
        server.play(Act(num_tokens=3, hang=True), Act(num_tokens=3, hang=True), Act())
        with hanging_stream(url) as other:
            lines = other.iter_lines()
            next(lines)
            with hanging_stream(url):
                wait_until(lambda: len(server.seen.generate) == 2, "the second request")
            assert server.seen.cancelled.wait(PATIENCE_S)
            assert ANSWER == texts_of(http.post("/v1/completions", json=BODY))
        assert 1 == server.seen.num_batches

    def test_credentials_do_not_mix(self, url, http, server):
        """
        Requests with different keys are in different batches, each with its own metadata.
        """
        server.play(Act(num_tokens=3, hang=True), Act())
        with hanging_stream(url):
            assert server.seen.hanging.wait(PATIENCE_S)
            http.post("/v1/completions", json=BODY, headers={"Authorization": "Bearer other"})
        assert 2 == server.seen.num_batches
        assert "Bearer other" == server.seen.metadata[-1]["authorization"]


class TestCallsOfTheirOwn:
    @pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
    def test_scheduler_without_batches_is_served_with_plain_calls(self, http, server, is_streamed):
        """
        A scheduler that does not know GenerateBatch serves requests with plain calls.
        """
        server.seen.knows_batches = False
        for _ in range(3):
            answer = http.post("/v1/completions", json=BODY | {"stream": is_streamed})
            assert 200 == answer.status_code
        assert 3 == len(server.seen.generate)

    def test_item_over_the_limit_has_its_own(self, http, server):
        """
        A request beyond the items that one connection may have is served all the same.
        """
        full = QueueFull("full", metadata={"limit": "max_items_in_flight"})
        server.play(Act(accept=False, error=full), Act())
        assert ANSWER == texts_of(http.post("/v1/completions", json=BODY))
        assert 2 == len(server.seen.generate)

    def test_large_request_has_its_own(self, http, server):
        """
        A request so large that gRPC may refuse it puts no batch at risk.
        """
        answer = http.post("/v1/completions", json=BODY | {"prompt": "x" * MAX_SHARED_BYTES})
        assert ANSWER == texts_of(answer)
        assert 0 == server.seen.num_batches


class Gathering:
    """Call that takes messages until it has so many items."""

    def __init__(self, num_items):
        self.messages, self.is_full = [], asyncio.Event()
        self._num_left = num_items

    def start(self, requests):
        self._requests = requests
        return self

    async def __aiter__(self):
        async for message in self._requests:
            self.messages.append(message)
            self._num_left -= len(message.add)
            if not self._num_left:
                self.is_full.set()
            yield batch_pb2.GenerateBatchResponse()

    def cancel(self):
        pass


class TestMessages:
    async def test_no_message_of_several_items_grows_beyond_the_limit(self):
        """
        Items that wait share messages as long as these are no larger than MAX_SHARED_BYTES.
        """
        call = Gathering(7)
        batch = BatchCall(call.start, joins=True, on_closed=lambda _: None)
        request = inference.GenerateRequest(text="a" * (MAX_SHARED_BYTES // 3))
        for _ in range(7):
            batch.add(request, None)
        await asyncio.wait_for(call.is_full.wait(), PATIENCE_S)
        await batch.close()

        assert [2, 2, 2, 1] == [len(message.add) for message in call.messages]
        assert all(message.ByteSize() <= MAX_SHARED_BYTES for message in call.messages)


class LostStatus:
    """Call that sends these messages, and ends as grpc.aio ends one under a write."""

    def __init__(self, *messages):
        self._messages = messages

    async def __aiter__(self):
        for message in self._messages:
            yield message
        none = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, none, none, STATUS_LOST, "")

    def cancel(self):
        """Do nothing: it has ended."""


class TestLostStatus:
    @staticmethod
    async def outcome(*messages):
        """Return what the reader of item 1 gets: events by kind, and the code of a failure."""

        async def alone():
            yield inference.GenerateResponse(done=stream_pb2.Done())

        batch = BatchCall(lambda _: LostStatus(*messages), joins=True, on_closed=lambda _: None)
        found = []
        try:
            async for event in batch.add(inference.GenerateRequest(), alone):
                found += (event.WhichOneof("event"),)
        except grpc.RpcError as failure:
            found.append(from_rpc_error(failure).code)
        return found

    async def test_item_without_events_gets_the_status_of_its_own_call(self):
        """
        A batch that is refused while its first request is written tells no status of the server:
        the item asks again, alone.
        """
        assert ["done"] == await self.outcome()

    async def test_item_with_events_is_broken(self):
        """
        An item that has begun ends UNAVAILABLE, which is resumed, and not INTERNAL.
        """
        begun = batch_pb2.BatchEvent(item=1, started=stream_pb2.Started())
        message = batch_pb2.GenerateBatchResponse(events=[begun])
        assert ["started", "UNAVAILABLE"] == await self.outcome(message)


class RefusesAll(grpc.aio.ServerInterceptor):
    """Refuses every call as one with a wrong key, at once."""

    async def intercept_service(self, _continuation, _details):
        async def refuse(_requests, context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")
            yield

        return grpc.stream_stream_rpc_method_handler(refuse)


def tasks_of_calls():
    """Return all tasks but those of the server in this loop."""
    return {one for one in asyncio.all_tasks() if "Server" not in one.get_coro().__qualname__}


class TestRefusedCall:
    @pytest.mark.slow
    @pytest.mark.parametrize("size", [10, 200_000])
    async def test_leaves_no_task_and_no_complaint(self, size):
        """
        A call that is refused, before or while its first request is written, leaves no task behind
        and nothing that asyncio would log.
        """
        complaints = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, about: complaints.append(about["message"]))
        server = grpc.aio.server(interceptors=[RefusesAll()])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = InferenceServiceStub(channel)
            before = tasks_of_calls()
            for _ in range(5):
                batch = BatchCall(stub.GenerateBatch, joins=True, on_closed=lambda _: None)
                request = inference.GenerateRequest(text="a" * size)
                item = batch.add(request, lambda request=request: stub.Generate(request))
                with pytest.raises(grpc.RpcError):
                    await anext(aiter(item))
                item.cancel()
            del batch, item
            if left := tasks_of_calls() - before:
                await asyncio.wait(left, timeout=PATIENCE_S)
            gc.collect()
            await asyncio.sleep(0)
            assert set() == tasks_of_calls() - before
        await server.stop(None)
        assert [] == complaints
