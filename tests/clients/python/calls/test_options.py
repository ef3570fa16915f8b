"""Clients with other settings over one connection, and the admin client for asyncio."""

from __future__ import annotations

import math

import grpc.aio
import pytest

from tandem_client import (
    NO_RETRY,
    AdminClient,
    AsyncAdminClient,
    AsyncClient,
    ChannelOptions,
    Client,
    DeadlineExceeded,
    KvMode,
    QueueFull,
    RequestState,
)
from tests.clients.python.fake_server import ANSWER, PATIENCE_S, Act

BASE = ChannelOptions(metadata=(("base", "1"),))


class TestWithOptions:
    def test_default_deadline_ends_calls_that_have_none(self, server):
        """
        The default deadline holds for streams, unary calls and batches.
        """
        server.play(Act(num_tokens=2, hang=True))
        with Client(server.address).with_options(deadline_s=0.2) as client:
            with pytest.raises(DeadlineExceeded):
                list(client.generate("hi"))
            with pytest.raises(DeadlineExceeded):
                client.complete("hi")
            assert [DeadlineExceeded] == [type(one) for one in client.generate_many(["hi"])]

    async def test_default_deadline_ends_calls_of_tasks(self, server):
        """
        The default deadline holds for asyncio, too.
        """
        server.play(Act(num_tokens=2, hang=True))
        async with AsyncClient(server.address) as plain:
            client = plain.with_options(deadline_s=0.2)
            with pytest.raises(DeadlineExceeded):
                await client.generate("hi").result()
            with pytest.raises(DeadlineExceeded):
                await client.complete("hi")

    def test_deadline_of_a_call_wins_and_infinity_is_none(self, server):
        """
        A call's own deadline replaces the default, and infinity takes it away.
        """
        with Client(server.address) as plain:
            client = plain.with_options(deadline_s=0.0)
            assert ANSWER == client.complete("hi", deadline_s=PATIENCE_S).text
            assert ANSWER == client.complete("hi", deadline_s=math.inf).text
            assert ANSWER == client.with_options(deadline_s=math.inf).generate("hi").result().text
            with pytest.raises(DeadlineExceeded):
                client.complete("hi")

    def test_client_itself_stays_as_it_was(self, server):
        """
        Settings of the new client leave those of the first alone, over the same connection.
        """
        server.play(Act(accept=False, error=QueueFull("full", retry_after_s=0.0)), Act())
        with Client(server.address) as client:
            impatient = client.with_options(retry=NO_RETRY)
            with pytest.raises(QueueFull):
                list(impatient.generate("hi"))
            server.play(Act(accept=False, error=QueueFull("full", retry_after_s=0.0)), Act())
            assert ANSWER == client.generate("hi").result().text

    def test_metadata_is_added_to_that_of_the_client(self, server):
        """
        Pairs, a mapping and a function that is asked before each call add to what is sent already.
        """
        number = iter(range(9))
        with Client(server.address, options=BASE) as plain:
            client = plain.with_options(metadata={"team": "a"}).with_options(
                metadata=lambda: [("number", str(next(number)))]
            )
            client.complete("hi")
            list(client.generate("hi"))
            plain.complete("hi")
        sent = [
            {key: one[key] for key in ("base", "team", "number") if key in one}
            for one in server.seen.metadata
        ]
        assert [
            {"base": "1", "team": "a", "number": "0"},
            {"base": "1", "team": "a", "number": "1"},
            {"base": "1"},
        ] == sent

    async def test_clients_for_asyncio_share_the_connection_too(self, server):
        """
        A client made before the first call uses the connection of the other, which closes both.
        """
        client = AsyncClient(server.address)
        other = client.with_options(metadata=[("team", "b")])
        assert ANSWER == (await other.complete("hi")).text
        await client.close()
        assert "b" == server.seen.metadata[0]["team"]
        with pytest.raises(grpc.aio.UsageError):
            await other.complete("hi", deadline_s=1.0)

    def test_admin_client_has_them_too(self, server):
        """
        The admin client has the same method.
        """
        with AdminClient(server.address) as admin:
            assert 2 == admin.with_options(deadline_s=PATIENCE_S).stats().running_requests


class TestAsyncAdminClient:
    async def test_every_call_answers_as_that_of_the_client_for_threads(self, server):
        """
        Each method returns what the blocking client returns.
        """
        with AdminClient(server.address) as blocking:
            events = blocking.request_events("any")
            listed = blocking.list_requests(states=[RequestState.DECODE])
            settings = blocking.config()
        async with AsyncAdminClient(server.address) as admin:
            assert 2 == (await admin.stats()).running_requests
            assert 1 == await admin.drain(0.5)
            assert settings == await admin.config()
            assert listed == await admin.list_requests(states=[RequestState.DECODE])
            assert events == await admin.request_events("any")
            assert 3 * 2**20 == await admin.suspend(KvMode.OFFLOAD)
            await admin.resume()
            assert 12 == await admin.flush_prefix_cache()
        assert [0.5] == server.seen.drain_grace_s
        assert [int(KvMode.OFFLOAD), None] == server.seen.suspensions
        assert server.seen.listed[0] == server.seen.listed[1]

    def test_it_has_every_call_of_the_client_for_threads(self):
        """
        Both admin clients have the same methods.
        """
        names = {name for name in dir(AdminClient) if not name.startswith("_")}
        assert names == {name for name in dir(AsyncAdminClient) if not name.startswith("_")}
