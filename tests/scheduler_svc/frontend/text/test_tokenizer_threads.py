"""Threads for slow work on text."""

import asyncio
import threading

import pytest

from scheduler_svc.frontend.text.tokenizer_threads import TokenizerThreads
from tandem.errors import QueueFull
from tests.scheduler_svc.frontend.fake_core import until, within


class TestTokenizerThreads:
    async def test_queue_is_bounded_until_work_is_done(self):
        """
        Work past the limit is refused, also while work with a cancelled caller goes on; work that
        is done frees places.
        """
        threads, go, has_begun = (
            TokenizerThreads(1, max_waiting=1),
            threading.Event(),
            asyncio.Event(),
        )
        loop = asyncio.get_running_loop()

        def hold() -> None:
            loop.call_soon_threadsafe(has_begun.set)
            go.wait()

        running = asyncio.create_task(threads.run(hold))
        await within(has_begun.wait())
        waiting = asyncio.create_task(threads.run(lambda: "done"))
        await until(lambda: threads._num_inside == 2)
        running.cancel()
        await asyncio.wait((running,))
        with pytest.raises(QueueFull, match="2 prompts wait to be tokenized") as caught:
            await threads.run(lambda: "late")
        assert {"limit": "max_waiting_prompts"} == caught.value.metadata
        go.set()
        assert "done" == await within(waiting)
        await until(lambda: threads._num_inside == 0)
        assert "next" == await within(threads.run(lambda: "next"))
        threads.close()

    async def test_failure_of_the_work_is_raised(self):
        """
        An error of the work reaches the caller.
        """
        threads = TokenizerThreads(1, max_waiting=1)
        with pytest.raises(ZeroDivisionError):
            await within(threads.run(lambda: 1 / 0))
        threads.close()

    @pytest.fixture
    def held(self):
        """Yield one thread with three places, held by the first of a tenant's jobs."""
        threads, go = TokenizerThreads(1, max_waiting=2), threading.Event()
        yield threads, go
        go.set()
        threads.close()

    async def test_tenant_below_its_share_is_not_refused(self, held):
        """
        Where a tenant has all places, its next work is refused and that of another is not, up to
        the other's share; the other's turn comes before what the first has waiting.
        """
        threads, go = held
        order: list[str] = []
        greedy = [asyncio.create_task(threads.run(go.wait, tenant="greedy"))]
        for _ in range(2):
            work = threads.run(lambda: order.append("greedy"), tenant="greedy")
            greedy.append(asyncio.create_task(work))
        await until(lambda: threads._num_inside == 3)
        with pytest.raises(QueueFull):
            await threads.run(lambda: None, tenant="greedy")
        polite = asyncio.create_task(threads.run(lambda: order.append("polite"), tenant="polite"))
        await until(lambda: threads._num_inside == 4)
        with pytest.raises(QueueFull):
            await threads.run(lambda: None, tenant="polite")
        go.set()
        await within(asyncio.gather(*greedy, polite))
        assert ["greedy", "polite", "greedy"] == order

    async def test_many_tenants_have_a_bound_together(self, held):
        """
        Work of ever other tenants is refused at twice the places.
        """
        threads, go = held
        tasks = [
            asyncio.create_task(threads.run(go.wait, tenant=f"tenant {number}"))
            for number in range(6)
        ]
        await until(lambda: threads._num_inside == 6)
        with pytest.raises(QueueFull):
            await threads.run(lambda: None, tenant="one more")
        go.set()
        await within(asyncio.gather(*tasks))

    async def test_cancelled_work_that_waits_leaves_at_once(self, held):
        """
        A caller that is cancelled gives its place back before any thread is free.
        """
        threads, go = held
        running = asyncio.create_task(threads.run(go.wait, tenant="greedy"))
        waiting = asyncio.create_task(threads.run(lambda: None, tenant="greedy"))
        await until(lambda: threads._num_inside == 2)
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert 1 == threads._num_inside
        go.set()
        assert await within(running)
