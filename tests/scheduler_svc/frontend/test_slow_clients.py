"""Clients that stop reading for a while, and frontends that are themselves stopped."""

from collections import Counter
from contextlib import asynccontextmanager

import grpc
import pytest

from scheduler_svc.core.request.request import FinishReason
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.scheduler_svc.frontend.calls import rest_of
from tests.scheduler_svc.frontend.fake_core import (
    Frontend,
    ended,
    model,
    running_frontend,
    serve,
    until,
    within,
)

FLOOD = 4000
"""Number of tokens per message of the core."""
NUM_FLOODS = 60
"""
Number of messages that are several times what a connection buffers for a client that does not read.
"""


@asynccontextmanager
async def small_window(frontend: Frontend):
    """Yield a stub with a connection that buffers little unread data."""
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))
    async with grpc.aio.insecure_channel(frontend.servers.address, options=options) as channel:
        yield InferenceServiceStub(channel)


async def flood(frontend: Frontend, stream_id: int, inbox, choice: int) -> None:
    for sent in range(0, FLOOD * NUM_FLOODS, FLOOD):
        await frontend.core.tokens(stream_id, sent, [270] * FLOOD)
        await until(lambda sent=sent: inbox.choices[choice].num_received >= sent + FLOOD)


class TestReadingAgain:
    @pytest.mark.slow
    async def test_all_is_there_for_who_reads_again_in_time(self, tmp_path, model_dir):
        """
        A client that stops reading and goes on before the deadline gets every token of each choice,
        in order, in few messages; meanwhile another request is served.
        """
        async with running_frontend(tmp_path, max_pending_bytes=2**30) as frontend:
            await serve(frontend, model(model_dir))
            async with small_window(frontend) as stub:
                call = stub.Generate(
                    pb.GenerateRequest(token_ids={"ids": [5]}, sampling={"temperature": 1.0}, n=2)
                )
                first = await frontend.core.accept()
                await within(call.read())
                inbox = next(iter(frontend.client.streams._inboxes.values()))
                for choice in (0, 1):
                    await flood(frontend, first + choice, inbox, choice)
                await until(lambda: inbox.num_pending_bytes > 0)

                other = InferenceServiceStub(frontend.channel).Complete(
                    pb.CompleteRequest(request=pb.GenerateRequest(token_ids={"ids": [6]}))
                )
                other_id = await frontend.core.accept()
                end = ended(other_id, FinishReason.MAX_TOKENS, 1)
                await frontend.core.tokens(other_id, 0, [70], end=end)
                assert [70] == list((await within(other)).completions[0].token_ids)

                total = FLOOD * NUM_FLOODS
                for choice in (0, 1):
                    end = ended(first + choice, FinishReason.MAX_TOKENS, total)
                    await frontend.core.tokens(first + choice, total, [], end=end)
                messages = await rest_of(call)
        deltas = [one.delta for one in messages if one.WhichOneof("event") == "delta"]
        received: Counter[int] = Counter()
        for delta in deltas:
            assert received[delta.choice] == delta.first_token_offset
            received[delta.choice] += len(delta.token_ids)
        assert {0: total, 1: total} == received
        assert len(deltas) < 2 * NUM_FLOODS
        assert 2 * total == messages[-1].done.usage.output_tokens


class TestStoppedFrontend:
    @pytest.mark.slow
    async def test_time_without_the_frontend_is_not_blamed_on_clients(self, tmp_path, model_dir):
        """
        A frontend that stood still for longer than the deadline ends no stream because of it.
        """
        async with running_frontend(
            tmp_path, max_pending_bytes=2**30, stall_deadline_s=600.0
        ) as frontend:
            await serve(frontend, model(model_dir))
            async with small_window(frontend) as stub:
                call = stub.Generate(pb.GenerateRequest(token_ids={"ids": [5]}))
                stream_id = await frontend.core.accept()
                await within(call.read())
                inbox = next(iter(frontend.client.streams._inboxes.values()))
                await flood(frontend, stream_id, inbox, 0)
                began_s = await until(lambda: inbox._write_began_s)
                frontend.clock.lead_s = 1000.0
                await until(lambda: inbox._write_began_s != began_s)
                total = FLOOD * NUM_FLOODS
                end = ended(stream_id, FinishReason.MAX_TOKENS, total)
                await frontend.core.tokens(stream_id, total, [], end=end)
                messages = await rest_of(call)
        assert total == messages[-1].done.usage.output_tokens

    @pytest.mark.slow
    async def test_time_without_the_frontend_is_not_blamed_on_the_core(self, tmp_path, model_dir):
        """
        A frontend that stood still never reports that the core is not alive.
        """
        async with running_frontend(tmp_path, core_timeout_s=600.0) as frontend:
            await serve(frontend, model(model_dir))
            client = frontend.client
            await within(client.served.get())
            seen: list[bool] = []
            client.on_change(lambda: seen.append(client.is_alive()))
            turns = client.num_turns
            frontend.clock.lead_s = 1000.0
            await until(lambda: client.num_turns > turns + 1)
            assert all(seen)
            assert client.is_alive()
