"""Identity of the items of a GenerateBatch stream: that of the credential that opened it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from scheduler_svc.config.frontend_security import FrontendSecurity
from tandem.inference.v1 import inference_service_pb2 as pb
from tests.scheduler_svc.frontend.batch.test_generate_batch import Stream, finish
from tests.scheduler_svc.frontend.calls import stub_of
from tests.scheduler_svc.frontend.fake_core import (
    Frontend,
    model,
    running_frontend,
    serve,
    until,
    within,
)
from tests.scheduler_svc.frontend.identity.credentials import (
    GATEWAY,
    OPERATOR,
    OTHER,
    USER,
    bearer,
    write_file,
)


def opened(secured: Frontend, token: str | None) -> Stream:
    return Stream(secured.channel, metadata=bearer(token))


async def submitted_tenant(secured: Frontend) -> str:
    submit = await within(secured.core.submits.get())
    return submit.tenant


class TestTenants:
    async def test_item_of_another_tenant_fails_alone(self, secured):
        """
        An item that names a tenant other than the credential's is refused; one that names none
        counts for the credential's, and runs.
        """
        stream = opened(secured, USER)
        await stream.add(1, tenant="globex")
        await stream.add(2)
        submit = await within(secured.core.submits.get())
        assert "acme" == submit.tenant
        await secured.core.accept_of(submit)
        await within(stream.call.done_writing())
        await finish(secured, submit.stream_id, [70])
        await stream.rest()
        assert "PERMISSION_DENIED" == stream.error(1).reason
        assert [70] == stream.ids(2)

    @pytest.mark.slow
    async def test_refused_items_share_lines_of_the_log(self, secured):
        """
        Of many items that are refused for their tenant one has a line of its own: the others are
        told together, as calls are.
        """
        structlog.reset_defaults()
        with capture_logs(processors=[merge_contextvars]) as logged:
            stream = opened(secured, USER)
            await stream.add(*range(1, 51), tenant="globex")
            await within(stream.call.done_writing())
            await stream.rest()
            await until(lambda: [one for one in logged if one["event"] == "calls_refused"])
        assert {"PERMISSION_DENIED"} == {stream.error(item).reason for item in range(1, 51)}
        (line,) = [one for one in logged if one["event"] == "call_failed"]
        assert ("PERMISSION_DENIED", "user") == (line["reason"], line["credential"])
        (told,) = [one for one in logged if one["event"] == "calls_refused"]
        assert 49 == told["num_calls"]

    async def test_gateway_speaks_for_a_tenant_in_each_item(self, secured):
        """
        Items of one gateway's stream count for the tenants that they name.
        """
        stream = opened(secured, GATEWAY)
        await stream.add(1, tenant="acme")
        await stream.add(2, tenant="globex")
        assert {"acme", "globex"} == {
            await submitted_tenant(secured),
            await submitted_tenant(secured),
        }
        stream.call.cancel()
        await until(lambda: len(secured.client.streams) == 0)

    async def test_priority_beyond_the_credentials_fails_the_item(self, secured):
        """
        The highest priority of a credential holds for each item.
        """
        stream = opened(secured, GATEWAY)
        await stream.add(1, priority=-11)
        await within(stream.call.done_writing())
        await stream.rest()
        assert "PERMISSION_DENIED" == stream.error(1).reason

    @pytest.mark.parametrize(
        ("token", "reason"),
        [(None, "UNAUTHENTICATED"), ("wrong", "UNAUTHENTICATED"), (OPERATOR, "PERMISSION_DENIED")],
    )
    async def test_stream_needs_a_credential_that_may_generate(self, secured, token, reason):
        """
        Without a credential, with a wrong one or one of another role the call itself fails.
        """
        stream = opened(secured, token)
        assert reason == (await stream.failure()).reason


class TestShares:
    @pytest.fixture
    async def small(self, tmp_path: Path, model_dir: Path) -> AsyncIterator[Frontend]:
        """A frontend whose core has eight places."""
        security = FrontendSecurity(tokens_file=str(write_file(tmp_path)))
        async with running_frontend(tmp_path, security=security, max_num_seqs=8) as frontend:
            await serve(frontend, model(model_dir))
            yield frontend

    async def test_items_over_the_tenants_share_are_refused_unread(self, small):
        """
        Of a tenant's thousands of items over two streams as many as there are places reach the core;
        each other one gets QUEUE_FULL with a time. Calls of a tenant with few are served beside
        them, also while its share of places is taken, and leave the greedy one its share.
        """
        first, second = opened(small, USER), opened(small, USER)
        await first.add(*range(1, 1001))
        taken = [await within(small.core.submits.get()) for _ in range(8)]
        await second.add(*range(1, 1001))
        await within(second.call.done_writing())
        await first.until_over(*range(9, 1001))
        await second.rest()
        assert {"acme"} == {submit.tenant for submit in taken}
        assert small.core.submits.empty()
        errors = [first.error(item) for item in range(9, 1001)]
        errors += [second.error(item) for item in range(1, 1001)]
        assert {("QUEUE_FULL", "max_num_seqs", True)} == {
            (one.reason, one.metadata["limit"], one.retry_after_s is not None) for one in errors
        }

        stub = stub_of(small)
        polite = [
            stub.Generate(pb.GenerateRequest(text="a"), metadata=bearer(OTHER)) for _ in "1234"
        ]
        theirs = [await within(small.core.submits.get()) for _ in polite]
        assert {"globex"} == {submit.tenant for submit in theirs}
        more = opened(small, USER)
        await more.add(1)
        await within(more.call.done_writing())
        await more.rest()
        assert "QUEUE_FULL" == more.error(1).reason
        for call in (*polite, first.call):
            call.cancel()

    async def test_ended_items_make_room(self, small):
        """
        An item counts until it has ended: then the next one is served.
        """
        stream = opened(small, USER)
        await stream.add(*range(1, 9))
        taken = [await within(small.core.submits.get()) for _ in range(8)]
        await small.core.accept_of(taken[0])
        await finish(small, taken[0].stream_id, [70])
        await stream.until_over(1)
        await stream.add(9)
        assert "acme" == (await within(small.core.submits.get())).tenant
        stream.call.cancel()

    async def test_items_of_a_gateway_count_for_no_tenant(self, small):
        """
        Items of a delegate are left to the core, which knows the tenants that they name.
        """
        stream = opened(small, GATEWAY)
        await stream.add(*range(1, 21), tenant="acme")
        for _ in range(20):
            await within(small.core.submits.get())
        stream.call.cancel()

    async def test_items_without_credentials_are_left_to_the_core(self, tmp_path, model_dir):
        """
        Where callers need no credential no tenant has a share before the core.
        """
        async with running_frontend(tmp_path, max_num_seqs=8) as frontend:
            await serve(frontend, model(model_dir))
            stream = Stream(frontend.channel)
            await stream.add(*range(1, 21))
            for _ in range(20):
                await within(frontend.core.submits.get())
            stream.call.cancel()


class TestMemory:
    async def test_client_that_goes_leaves_nothing(self, secured):
        """
        When a client disconnects with items in flight, waiting and unread, none is kept.
        """
        for _ in range(3):
            stream = opened(secured, USER)
            await stream.add(*range(1, 33))
            ids = [await secured.core.accept() for _ in range(32)]
            for stream_id in ids[:16]:
                await secured.core.tokens(stream_id, 0, [70] * 500)
            stream.call.cancel()
            await until(lambda: len(secured.client.streams) == 0)
            assert not secured.client.streams._inboxes
            assert not secured.client.streams._shared_writes
