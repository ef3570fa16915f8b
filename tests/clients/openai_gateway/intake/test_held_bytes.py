"""Bytes that bodies hold: all of them together, those of one key, and what is given back."""

from __future__ import annotations

import asyncio
import threading

import pytest
from starlette.requests import ClientDisconnect

from tandem_openai_gateway.api.body import IN_THREAD_BYTES, Bodies
from tandem_openai_gateway.api.held_bytes import HeldBytes
from tandem_openai_gateway.errors import ApiError
from tests.clients.openai_gateway.intake.sent import Sent, decoded, refusal
from tests.clients.python.fake_server import PATIENCE_S
from tests.scheduler_svc.frontend.fake_core import until

ALL = 1200
"""Bytes that all bodies may hold; each byte of one counts twice."""


@pytest.fixture
def held() -> HeldBytes:
    return HeldBytes(ALL)


@pytest.fixture
def bodies(held: HeldBytes) -> Bodies:
    return Bodies(ALL, held=held)


async def begun(bodies: Bodies, sent: Sent, num_bytes: int) -> asyncio.Task:
    """Let a part of a body arrive; return the task that reads it."""
    reading = asyncio.create_task(decoded(bodies, sent))
    sent.send(b"a" * num_bytes)
    await sent.is_read()
    return reading


def free(held: HeldBytes) -> int:
    """Return how many bytes are free."""
    return ALL - held._num_bytes


class TestTogether:
    async def test_bodies_together_are_bounded(self, bodies):
        """
        A part of a body for which there is no room is 503 with the time to come again; there is
        room when another body has been read.
        """
        first, second, third = Sent(b"a"), Sent(b"b"), Sent(b"c")
        reading = await begun(bodies, first, 400)
        second.send(b"b" * 400, more=False)
        error = await refusal(decoded(bodies, second))
        assert (503, "1") == (error.status, error.headers["Retry-After"])
        first.send(b"a", more=False)
        assert b"a" * 401 == await reading
        third.send(b"c" * 400, more=False)
        assert b"c" * 400 == await decoded(bodies, third)

    async def test_body_that_is_alone_may_have_more(self, bodies, held):
        """
        A body is not refused for its size while no other is held, so that each that is allowed can
        be served some time.
        """
        alone = Sent()
        alone.send(b"a" * ALL, more=False)
        assert ALL == len(await decoded(bodies, alone))
        assert ALL == free(held)


class TestShares:
    async def test_one_key_leaves_room_for_others(self, bodies, held):
        """
        Bodies with one key hold two thirds at most, however many there are; another key's are read
        beside them, and strangers, who have no key, are one key together.
        """
        greedy = [await begun(bodies, Sent(b"greedy"), 50) for _ in range(8)]
        error = await refusal(await begun(bodies, Sent(b"greedy"), 50))
        assert (503, "overloaded") == (error.status, error.body.error.code)
        assert "1" == error.headers["Retry-After"]
        assert 400 == free(held)
        polite = Sent(b"polite")
        polite.send(b"a" * 100, more=False)
        assert 100 == len(await decoded(bodies, polite))
        strangers = [await begun(bodies, Sent(), 50) for _ in range(2)]
        await begun(bodies, Sent(), 50)
        assert 503 == (await refusal(await begun(bodies, Sent(), 50))).status
        for reading in (*greedy, *strangers):
            assert not reading.done()

    async def test_share_is_there_again_after_a_refusal(self, bodies):
        """
        A refused body gives back what it held, and the key may send when another has been read.
        """
        first = Sent(b"greedy")
        reading = await begun(bodies, first, 350)
        assert 503 == (await refusal(await begun(bodies, Sent(b"greedy"), 151))).status
        first.send(b"", more=False)
        await reading
        again = Sent(b"greedy")
        again.send(b"a" * 350, more=False)
        assert 350 == len(await decoded(bodies, again))


class TestHeld:
    async def test_body_counts_until_what_was_made_of_it_is_used(self, bodies, held):
        """
        A byte counts twice while its body is read and decoded, once while what was made of it is
        used, and then no more.
        """
        sent, seen = Sent(), []
        reading = await begun(bodies, sent, 100)
        seen.append(free(held))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        whole = Sent()
        whole.send(b"a" * 100, more=False)

        def decode(_body: bytes) -> None:
            seen.append(free(held))

        async with bodies.decoded(whole.request, whole.key, decode):
            seen.append(free(held))
        assert [ALL - 200, ALL - 200, ALL - 100, ALL] == [*seen, free(held)]

    async def test_client_that_leaves_in_the_middle_gives_its_share_back(self, bodies, held):
        """
        Bytes that a client had sent before it left are taken off the count once.
        """
        sent = Sent()
        reading = await begun(bodies, sent, 100)
        assert ALL - 200 == free(held)
        sent.disconnect()
        with pytest.raises(ClientDisconnect):
            await reading
        assert (ALL, {}) == (free(held), held._of_key)

    async def test_body_that_cannot_be_used_gives_its_share_back(self, bodies, held):
        """
        So does a body that is refused where it is decoded, and one whose use fails.
        """

        def refuse(_body: bytes) -> None:
            raise ApiError(400, "no")

        sent, other = Sent(), Sent()
        sent.send(b"a", more=False)
        other.send(b"a", more=False)
        await refusal(decoded(bodies, sent, refuse))
        with pytest.raises(KeyError):
            async with bodies.decoded(other.request, b"", bytes):
                raise KeyError
        assert (ALL, {}) == (free(held), held._of_key)

    async def test_body_counts_while_a_thread_has_it(self):
        """
        A request that is cancelled while a thread decodes its body counts until the thread is done
        with it; one that waits for the thread counts no more at once.
        """
        held, goes_on = HeldBytes(), threading.Event()
        bodies, begins = Bodies(1 << 20, held=held), threading.Event()

        def decode(_body: bytes) -> None:
            begins.set()
            assert goes_on.wait(PATIENCE_S)

        readings = []
        for _ in range(2):
            sent = Sent()
            sent.send(b"a" * IN_THREAD_BYTES, more=False)
            readings.append(asyncio.create_task(decoded(bodies, sent, decode)))
        await asyncio.to_thread(begins.wait, PATIENCE_S)
        assert 4 * IN_THREAD_BYTES == held._num_bytes
        for reading in readings:
            reading.cancel()
        await asyncio.gather(*readings, return_exceptions=True)
        assert 2 * IN_THREAD_BYTES == held._num_bytes
        goes_on.set()
        await until(lambda: not held._num_bytes)
        bodies.close()
