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
