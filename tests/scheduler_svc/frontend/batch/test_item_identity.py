"""Identity of the items of a GenerateBatch stream: that of the credential that opened it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scheduler_svc.config.frontend_security import FrontendSecurity
from tests.scheduler_svc.frontend.batch.test_generate_batch import Stream, finish
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
    USER,
    bearer,
    write_file,
)


@pytest.fixture
async def secured(tmp_path: Path, model_dir: Path) -> AsyncIterator[Frontend]:
    security = FrontendSecurity(tokens_file=str(write_file(tmp_path)))
    async with running_frontend(tmp_path, security=security) as frontend:
        await serve(frontend, model(model_dir))
        yield frontend


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
        await until(lambda: secured.client.num_streams == 0)

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
            await until(lambda: secured.client.num_streams == 0)
            assert not secured.client._inboxes
            assert not secured.client.shared_writes
