"""Streams that break where a thread, asyncio or a command reads them."""

from __future__ import annotations

import asyncio
import threading

import pytest
from typer.testing import CliRunner

from tandem.errors import Draining
from tandem_client import AsyncClient, Client, Delta, RetryPolicy
from tandem_client.cli.app import app
from tests.clients.python.fake_server import ANSWER, PATIENCE_S, Act

SOON = RetryPolicy(initial_delay_s=0.001, max_delay_s=0.001)


def breaking(*lengths: int) -> list[Act]:
    """Make calls that break when the client has so many tokens."""
    return [Act(num_tokens=n, error=Draining("bye", retry_after_s=0.0)) for n in lengths]


class TestClient:
    def test_break_is_told_in_its_place_among_the_output(self, server):
        """
        The thread that reads a stream hears of a break once it has all output before it, and
        before any after it.
        """
        server.play(*breaking(8), Act())
        seen: list[int | threading.Thread] = []
        policy = RetryPolicy(on_break=lambda *_: seen.append(threading.current_thread()))
        with Client(server.address, retry=policy) as client:
            for event in client.generate("hi"):
                if isinstance(event, Delta):
                    seen += event.token_ids

        tokens = list(map(ord, ANSWER))
        assert [*tokens[:8], threading.current_thread(), *tokens[8:]] == seen


class TestAsyncClient:
    async def test_broken_stream_goes_on(self, server):
        """
        Each choice of a stream that breaks twice comes whole, and a choice that ended is not asked for again.
        """
        ended = Act(num_tokens=len(ANSWER) + 1, error=Draining("bye", retry_after_s=0.0))
        server.play(*breaking(3), ended, Act())
        async with AsyncClient(server.address, retry=SOON) as client:
            stream = client.generate("hi", n=2)
            deltas = [event async for event in stream if isinstance(event, Delta)]
        texts = ["".join(d.text for d in deltas if d.choice == choice) for choice in (0, 1)]
        assert [ANSWER, f"{ANSWER.upper()}1"] == texts
        _, second, third = server.seen.generate
        assert [3, 3] == [len(one.token_ids) for one in second.resume.choices]
        assert [len(ANSWER), len(ANSWER) + 1] == [
            len(one.token_ids) for one in third.resume.choices
        ]

    async def test_close_ends_the_wait_for_a_server(self, server):
        """
        Closing a stream that waits for its server ends it at once.
        """
        server.play(Act(num_tokens=3, error=Draining("bye", retry_after_s=100.0)))
        waits = asyncio.Event()
        policy = RetryPolicy(on_break=lambda error, wait_s: waits.set())
        async with AsyncClient(server.address, retry=policy) as client:
            stream = client.generate("hi")

            async def read() -> int:
                return len([event async for event in stream])

            task = asyncio.create_task(read())
            await asyncio.wait_for(waits.wait(), PATIENCE_S)
            await stream.close()
            assert await asyncio.wait_for(task, PATIENCE_S) >= 1
        assert 1 == len(server.seen.generate)

    async def test_task_can_be_cancelled_while_it_waits(self, server):
        """
        Cancelling the task that waits for a server raises CancelledError there and asks for nothing more.
        """
        server.play(Act(num_tokens=3, error=Draining("bye", retry_after_s=100.0)))
        waits = asyncio.Event()
        policy = RetryPolicy(on_break=lambda error, wait_s: waits.set())
        async with AsyncClient(server.address, retry=policy) as client:

            async def read() -> None:
                async for _ in client.generate("hi"):
                    pass

            task = asyncio.create_task(read())
            await asyncio.wait_for(waits.wait(), PATIENCE_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert 1 == len(server.seen.generate)


class TestGenerateCommand:
    def test_broken_stream_is_printed_whole_and_said_so(self, server):
        """
        `tandem generate` prints each piece once, with one line on stderr about the pause.
        """
        server.play(*breaking(2, 5), Act())
        result = CliRunner().invoke(app, ["generate", "hi", "--address", server.address])
        assert (0, f"{ANSWER}\n") == (result.exit_code, result.stdout)
        said = "[the server is stopping: looking for a server to go on, for up to 60 s]"
        assert 1 == result.stderr.count(said)
