"""Requests of one generate_many that share a GenerateBatch stream."""

from __future__ import annotations

import asyncio

import pytest

from tandem_client import (
    NO_RETRY,
    AsyncClient,
    Client,
    Completion,
    DeadlineExceeded,
    Draining,
    NeverFits,
    QueueFull,
    RetryPolicy,
)
from tests.clients.python.fake_server import ANSWER, Act

QUICK = RetryPolicy(initial_delay_s=0.001)
PROMPTS = [f"prompt {number}" for number in range(12)]


def collect(server, prompts, *, retry=NO_RETRY, address=None, metadata=None, **options):
    """Return the outcomes of prompts by the client for threads."""
    with Client(address or server.address, retry=retry) as client:
        used = client.with_options(metadata=metadata)
        return list(used.generate_many(prompts, **options))


def collect_in_loop(server, prompts, *, retry=NO_RETRY, address=None, metadata=None, **options):
    """Return the outcomes of prompts by the client for asyncio."""

    async def run():
        async with AsyncClient(address or server.address, retry=retry) as client:
            used = client.with_options(metadata=metadata)
            return [one async for one in used.generate_many(prompts, **options)]

    return asyncio.run(run())


def texts(outcomes) -> list[str]:
    return [one.text if isinstance(one, Completion) else repr(one) for one in outcomes]


@pytest.mark.parametrize("run", [collect, collect_in_loop])
class TestSharing:
    def test_requests_of_one_call_share_one_stream(self, server, run):
        """
        All requests are items of one stream, each sent once.
        """
        assert [ANSWER] * 12 == texts(run(server, PROMPTS, concurrency=4))
        assert (1, 12) == (server.seen.num_batches, len(server.seen.generate))

    def test_failing_item_leaves_the_stream_to_the_others(self, server, run):
        """
        An item that is refused has its own error, and the others go on with the stream.
        """
        server.play(Act(), Act(accept=False, error=NeverFits("too big")), Act())
        outcomes = run(server, PROMPTS, concurrency=1)
        assert [Completion, NeverFits] + [Completion] * 10 == [type(one) for one in outcomes]
        assert 1 == server.seen.num_batches

    def test_several_servers_and_metadata_of_the_caller_are_for_calls(self, server, run):
        """
        Where calls take turns among servers, or each asks for its metadata, nothing is shared.
        """
        run(server, PROMPTS, address=f"ipv4:{server.address}")
        run(server, PROMPTS, metadata=lambda: {"traceparent": "mine"})
        assert (0, 24) == (server.seen.num_batches, len(server.seen.generate))

    def test_server_without_batches_is_called_for_each(self, server, run):
        """
        A server that does not know GenerateBatch gets one call per request.
        """
        server.seen.knows_batches = False
        assert [ANSWER] * 12 == texts(run(server, PROMPTS, concurrency=4))
        assert 12 == len(server.seen.generate)

    def test_large_request_is_a_call_of_its_own(self, server, run):
        """
        A request that may be too large for the server cannot end the stream of the others.
        """
        assert [ANSWER] * 2 == texts(run(server, ["small", "x" * (1 << 21)]))
        assert (1, 2) == (server.seen.num_batches, len(server.seen.generate))

    def test_item_beyond_the_limit_waits_as_a_call(self, server, run):
        """
        An item that the connection has no room for is sent as a call, without a retry.
        """
        full = QueueFull("full", metadata={"limit": "max_items_in_flight"})
        server.play(Act(accept=False, error=full), Act())
        assert [ANSWER] == texts(run(server, ["a"]))
        assert 2 == len(server.seen.generate)


@pytest.mark.parametrize("run", [collect, collect_in_loop])
class TestFailures:
    def test_items_of_a_broken_stream_are_resumed(self, server, run):
        """
        When the stream ends, items with output go on after it on the next stream.
        """
        server.play(*[Act(num_tokens=5, hang=True)] * 3, Act(num_tokens=3, ends_early=True), Act())
        assert [ANSWER] * 4 == texts(run(server, PROMPTS[:4], concurrency=4, retry=QUICK))
        assert 2 <= server.seen.num_batches
        resumed = [one for one in server.seen.generate[4:] if one.HasField("resume")]
        assert resumed
        assert all(one.resume.choices[0].token_ids for one in resumed)

    def test_item_refused_by_a_leaving_server_goes_elsewhere(self, server, run):
        """
        After a refusal that asks for another server the next items open another stream.
        """
        server.play(Act(accept=False, error=Draining("draining", retry_after_s=0.0)), Act())
        assert [ANSWER] * 2 == texts(run(server, ["a", "b"], concurrency=1, retry=QUICK))
        assert 2 == server.seen.num_batches

    def test_deadline_is_of_each_item(self, server, run):
        """
        A request whose deadline passes fails alone, and the server hears that it is cancelled.
        """
        server.play(Act(num_tokens=2, hang=True), Act())
        outcomes = run(server, ["a", "b"], concurrency=1, deadline_s=0.5)
        assert [DeadlineExceeded, Completion] == [type(one) for one in outcomes]
        assert server.seen.cancelled.is_set()
        assert 1 == server.seen.num_batches
