"""GenerateBatch over a real gRPC connection, the core played by the test."""

import asyncio

import grpc
import pytest
from google.rpc.status_pb2 import Status

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.ipc.messages import Availability
from tandem.errors import QueueFull, TandemError
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import model_pb2
from tandem.inference.v1.batch_pb2 import BatchEvent
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from tandem.status import from_rpc_error, from_status_proto
from tests.scheduler_svc.frontend.fake_core import (
    Frontend,
    ended,
    logprobs_of,
    model,
    refused,
    running_frontend,
    serve,
    until,
    within,
)

MAX_TOKENS = FinishReason.MAX_TOKENS


def request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"token_ids": {"ids": [5, 6, 7]}} | fields))


def adding(*items: int, **fields: object) -> pb.GenerateBatchRequest:
    return pb.GenerateBatchRequest(
        add=[pb.BatchItem(item=item, request=request(**fields)) for item in items]
    )


class Stream:
    """One call, whose events are kept by item."""

    def __init__(self, channel: grpc.aio.Channel, **options: object) -> None:
        self.call = InferenceServiceStub(channel).GenerateBatch(**options)
        self.events: dict[int, list] = {}
        self.num_messages = 0

    async def add(self, *items: int, **fields: object) -> None:
        await within(self.call.write(adding(*items, **fields)))

    async def read(self) -> bool:
        message = await within(self.call.read())
        if message is grpc.aio.EOF:
            return False
        self.num_messages += 1
        for event in message.events:
            self.events.setdefault(event.item, []).append(event)
        return True

    async def until_over(self, *items: int) -> None:
        while not all(self.is_over(item) for item in items):
            assert await self.read()

    async def rest(self) -> None:
        while await self.read():
            pass

    async def failure(self) -> TandemError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.rest()
        return from_rpc_error(caught.value)

    def is_over(self, item: int) -> bool:
        return bool({"done", "error"} & set(self.kinds(item)))

    def kinds(self, item: int) -> list[str]:
        return [event.WhichOneof("event") for event in self.events.get(item, [])]

    def ids(self, item: int) -> list[int]:
        deltas = [one.delta for one in self.events[item] if one.HasField("delta")]
        found: list[int] = []
        for delta in deltas:
            assert len(found) == delta.first_token_offset
            found += delta.token_ids
        return found

    def error(self, item: int) -> TandemError:
        return from_status_proto(Status.FromString(self.events[item][-1].error))


async def finish(frontend: Frontend, stream_id: int, ids: list[int]) -> None:
    end = ended(stream_id, MAX_TOKENS, len(ids))
    await frontend.core.tokens(stream_id, 0, ids, end=end)


async def drained(frontend: Frontend) -> None:
    await frontend.core.send(Availability(executor_attached=True, ready=True, draining=True))


class TestItems:
    async def test_items_share_a_stream_and_it_ends_after_the_last(self, frontend):
        """
        Each item gets the events of Generate in order; after half-close the call ends OK.
        """
        stream = Stream(frontend.channel)
        await stream.add(3, 8)
        first, second = await frontend.core.accept(), await frontend.core.accept()
        await within(stream.call.done_writing())
        await finish(frontend, second, [70, 71])
        await finish(frontend, first, [72])
        await stream.rest()
        assert grpc.StatusCode.OK == await within(stream.call.code())
        expected = ["started", "delta", "finished", "done"]
        assert (expected, expected) == (stream.kinds(3), stream.kinds(8))
        assert ([72], [70, 71]) == (stream.ids(3), stream.ids(8))
        await until(lambda: len(frontend.client.streams) == 0)

    async def test_half_close_without_items_ends_at_once(self, frontend):
        """
        A stream to which nothing was added ends OK.
        """
        stream = Stream(frontend.channel)
        await within(stream.call.done_writing())
        await stream.rest()
        assert grpc.StatusCode.OK == await within(stream.call.code())

    async def test_failing_items_leave_the_others_alone(self, frontend):
        """
        An invalid request and a refused one fail with the errors of Generate; others go on.
        """
        stream = Stream(frontend.channel)
        await stream.add(1, sampling={"temperature": -1.0}, request_id="bad")
        await stream.add(2, request_id="full")
        submit = await within(frontend.core.submits.get())
        full = QueueFull("full", retry_after_s=2.5, metadata={"limit": "max_waiting"})
        await frontend.core.send(refused(submit.stream_id, full))
        await stream.add(3)
        third = await frontend.core.accept()
        await within(stream.call.done_writing())
        await finish(frontend, third, [70])
        await stream.rest()
        bad, refusal = stream.error(1), stream.error(2)
        assert ("INVALID_PARAMETER", "sampling.temperature", "bad") == (
            bad.reason,
            bad.field,
            bad.request_id,
        )
        assert ("QUEUE_FULL", 2.5, "full") == (
            refusal.reason,
            refusal.retry_after_s,
            refusal.request_id,
        )
        assert [70] == stream.ids(3)

    async def test_scored_prompt_comes_before_the_end(self, frontend):
        """
        An item that asks for the log probabilities of its prompt gets each prompt token once.
        """
        stream = Stream(frontend.channel)
        await stream.add(4, response={"prompt_logprobs": 1}, stopping={"max_tokens": 0})
        stream_id = await frontend.core.accept()
        scores = [(-0.5, [(6, -0.5)]), (-2.0, [(9, -1.0)])]
        told = logprobs_of(stream_id, -2, scores, ranks=[1, 3])
        await frontend.core.tokens(
            stream_id, 0, [], logprobs=(told,), end=ended(stream_id, MAX_TOKENS, 0)
        )
        await stream.until_over(4)
        messages = [
            one.prompt_logprobs for one in stream.events[4] if one.HasField("prompt_logprobs")
        ]
        assert [5, 6, 7] == [id_ for one in messages for id_ in one.token_ids]
        assert [(0.0, 0), (-0.5, 1), (-2.0, 3)] == [
            (entry.logprob, entry.rank) for one in messages for entry in one.logprobs
        ]
        assert "started" == stream.kinds(4)[0]
        assert ["finished", "done"] == stream.kinds(4)[-2:]

    async def test_failure_after_output_tells_its_tokens(self, frontend):
        """
        The error of an item that was accepted says how many ids were sent.
        """
        stream = Stream(frontend.channel)
        await stream.add(1)
        stream_id = await frontend.core.accept()
        await frontend.core.tokens(stream_id, 0, [70, 71], failure=QueueFull("gone"))
        await stream.until_over(1)
        assert "2" == stream.error(1).metadata["tokens_emitted"]

    async def test_items_without_id_get_ids_of_their_own(self, frontend):
        """
        Items of one call have different request ids where the client sends none.
        """
        stream = Stream(frontend.channel)
        await stream.add(1, 2)
        submits = [await within(frontend.core.submits.get()) for _ in range(2)]
        assert 2 == len({submit.request_id for submit in submits})
        stream.call.cancel()


class TestCancel:
    async def test_cancelled_item_ends_in_the_core_and_then_for_the_client(self, frontend):
        """
        `cancel` asks the core to end one item; it gets Finished(CANCELLED), others go on.
        """
        stream = Stream(frontend.channel)
        await stream.add(1, 2)
        first, second = await frontend.core.accept(), await frontend.core.accept()
        await within(stream.call.write(pb.GenerateBatchRequest(cancel=[1])))
        told = await within(frontend.core.ends.get())
        assert (first, FinishReason.CANCELLED) == (told.stream_id, told.reason)
        end = ended(first, FinishReason.CANCELLED, 0)
        await frontend.core.tokens(first, 0, [], end=end)
        await stream.until_over(1)
        assert ["started", "finished", "done"] == stream.kinds(1)
        await within(stream.call.write(pb.GenerateBatchRequest(cancel=[1])))
        await within(stream.call.done_writing())
        await finish(frontend, second, [70])
        await stream.rest()
        assert [70] == stream.ids(2)

    async def test_cancelled_call_ends_all_items(self, frontend):
        """
        Cancelling the call ends every item in the core and leaves nothing behind.
        """
        stream = Stream(frontend.channel)
        await stream.add(1, 2)
        ids = {await frontend.core.accept(), await frontend.core.accept()}
        stream.call.cancel()
        assert ids == {(await within(frontend.core.ends.get())).stream_id for _ in ids}
        await until(lambda: len(frontend.client.streams) == 0)
        assert not frontend.client.streams._shared_writes

    @pytest.mark.slow
    async def test_deadline_covers_the_stream(self, frontend):
        """
        A deadline that passes ends the call with all its items.
        """
        stream = Stream(frontend.channel, timeout=5.0)
        await stream.add(1)
        await frontend.core.accept()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.rest()
        assert grpc.StatusCode.DEADLINE_EXCEEDED == caught.value.code()
        await until(lambda: len(frontend.client.streams) == 0)


class TestRules:
    def test_each_event_of_generate_is_one_of_items(self):
        """
        An item's event has the number, name and type that GenerateResponse gives it.
        """
        (of_generate,) = pb.GenerateResponse.DESCRIPTOR.oneofs
        of_items = BatchEvent.DESCRIPTOR.fields_by_number
        for field in of_generate.fields:
            found = of_items[field.number]
            assert (field.name, field.message_type) == (found.name, found.message_type)
            assert "event" == found.containing_oneof.name

    @pytest.mark.parametrize(
        ("message", "field"),
        [
            (adding(4, 4), "add[1].item"),
            (adding(4, 3), "add[1].item"),
            (pb.GenerateBatchRequest(add=[{"item": 1}], cancel=[2]), "cancel[0]"),
        ],
        ids=["duplicate", "falling", "unknown"],
    )
    async def test_wrong_numbers_end_the_call(self, frontend, message, field):
        """
        A number that is not above all before it, or a cancel of one never added, is refused.
        """
        stream = Stream(frontend.channel)
        await within(stream.call.write(message))
        error = await stream.failure()
        assert ("INVALID_PARAMETER", field) == (error.reason, error.field)
        await until(lambda: len(frontend.client.streams) == 0)

    async def test_malformed_first_message_is_a_typed_error(self, frontend):
        """
        Bytes that are no message end the call with INVALID_PARAMETER.
        """
        method = "/tandem.inference.v1.InferenceService/GenerateBatch"
        call = frontend.channel.stream_stream(method)()
        await within(call.write(b"\xff\xff"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await within(call.read())
        assert "INVALID_PARAMETER" == from_rpc_error(caught.value).reason

    async def test_too_many_items_fail_and_the_limit_is_published(self, tmp_path, model_dir):
        """
        An item beyond the limit of its connection fails alone; places become free again.
        """
        async with running_frontend(tmp_path, max_streams_per_connection=2) as frontend:
            await serve(frontend, model(model_dir))
            described = await within(
                InferenceServiceStub(frontend.channel).GetModel(model_pb2.GetModelRequest())
            )
            assert 2 == described.model.max_items_in_flight
            stream = Stream(frontend.channel)
            await stream.add(1, 2, 3)
            first, second = await frontend.core.accept(), await frontend.core.accept()
            await stream.until_over(3)
            error = stream.error(3)
            assert ("QUEUE_FULL", "max_items_in_flight") == (
                error.reason,
                error.metadata["limit"],
            )
            await finish(frontend, first, [70])
            await stream.until_over(1)
            await until(lambda: len(frontend.client.streams) == 1)
            await stream.add(4)
            last = await frontend.core.accept()
            await finish(frontend, second, [71])
            await finish(frontend, last, [72])
            await stream.until_over(2, 4)
            assert ([71], [72]) == (stream.ids(2), stream.ids(4))


class TestDrain:
    async def test_draining_ends_the_call_after_its_last_item(self, frontend):
        """
        Items in flight end well, new ones fail DRAINING, and then the call does.
        """
        stream = Stream(frontend.channel)
        await stream.add(1)
        first = await frontend.core.accept()
        await drained(frontend)
        await until(lambda: frontend.client.availability.draining)
        await stream.add(2)
        await stream.until_over(2)
        assert "DRAINING" == stream.error(2).reason
        await finish(frontend, first, [70])
        assert "DRAINING" == (await stream.failure()).reason
        assert [70] == stream.ids(1)

    async def test_idle_call_ends_when_draining_begins(self, frontend):
        """
        A stream without items does not hold up a service that stops.
        """
        stream = Stream(frontend.channel)
        await stream.add(1)
        await finish(frontend, await frontend.core.accept(), [70])
        await stream.until_over(1)
        await drained(frontend)
        assert "DRAINING" == (await stream.failure()).reason


class TestSlowReader:
    async def test_unread_output_is_merged_per_item(self, tmp_path, model_dir):
        """
        A client that stops reading, and goes on in time, gets every token in bounded messages.
        """
        async with running_frontend(tmp_path, max_pending_bytes=2**30) as frontend:
            await serve(frontend, model(model_dir))
            stream = Stream(frontend.channel)
            await stream.add(1)
            stream_id = await frontend.core.accept()
            total, flood = 200_000, 4000
            for sent in range(0, total, flood):
                await frontend.core.tokens(stream_id, sent, [270] * flood)
            await frontend.core.tokens(
                stream_id, total, [], end=ended(stream_id, MAX_TOKENS, total)
            )
            await within(stream.call.done_writing())
            await stream.rest()
        assert total == len(stream.ids(1))

    @pytest.mark.slow
    async def test_item_with_too_much_unread_output_fails_alone(self, tmp_path, model_dir):
        """
        Past the bound of one request its item ends SLOW_CONSUMER; another item goes on.
        """
        async with running_frontend(tmp_path, max_pending_bytes=2**20) as frontend:
            await serve(frontend, model(model_dir))
            options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))
            async with grpc.aio.insecure_channel(
                frontend.servers.address, options=options
            ) as channel:
                stream = Stream(channel)
                await stream.add(1, 2)
                greedy, modest = await frontend.core.accept(), await frontend.core.accept()
                inboxes = frontend.client.streams._inboxes
                sent = 0
                while not inboxes[greedy].is_closed:
                    await frontend.core.tokens(greedy, sent, [270] * 4000)
                    sent += 4000
                    inbox = inboxes[greedy]
                    await until(
                        lambda inbox=inbox, sent=sent: (
                            inbox.is_closed or inbox.choices[0].num_received >= sent
                        )
                    )
                await finish(frontend, modest, [70])
                await within(stream.call.done_writing())
                await stream.rest()
        assert "SLOW_CONSUMER" == stream.error(1).reason
        assert [70] == stream.ids(2)

    @pytest.mark.slow
    async def test_client_that_stalls_ends_the_call(self, tmp_path, model_dir):
        """
        A message that waits too long for the client ends the call with all its items.
        """
        async with running_frontend(
            tmp_path, max_pending_bytes=2**30, stall_deadline_s=600.0
        ) as frontend:
            await serve(frontend, model(model_dir))
            options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))
            async with grpc.aio.insecure_channel(
                frontend.servers.address, options=options
            ) as channel:
                stream = Stream(channel)
                await stream.add(1)
                stream_id = await frontend.core.accept()
                inboxes = frontend.client.streams._inboxes
                (write,) = frontend.client.streams._shared_writes
                for sent in range(0, 240_000, 4000):
                    await frontend.core.tokens(stream_id, sent, [270] * 4000)
                    await until(lambda sent=sent: inboxes[stream_id].choices[0].num_received > sent)
                inbox, pending = inboxes[stream_id], 0
                while not write.is_writing or pending != inbox.num_pending_bytes:
                    pending = inbox.num_pending_bytes  # until gRPC's windows are full
                    await asyncio.sleep(0.2)
                write.sweep(write._began_s + 600.0, stall_deadline_s=600.0)
                assert "SLOW_CONSUMER" == (await stream.failure()).reason
                await until(lambda: len(frontend.client.streams) == 0)
