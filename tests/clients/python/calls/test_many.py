"""Many completions at once."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from tandem.inference.v1 import inference_service_pb2 as pb
from tandem_client import (
    NO_RETRY,
    AsyncClient,
    Client,
    Completion,
    InvalidParameter,
    NeverFits,
    QueueFull,
)
from tandem_client.many.threads import in_threads
from tandem_client.streams.stream import GenerationStream
from tests.clients.python.fake_server import ANSWER, PATIENCE_S, Act
from tests.waiting import wait_until

PROMPTS = [f"prompt {number}" for number in range(20)]


def collect(server, prompts, **options):
    """Return the outcomes of prompts by the client for threads."""
    with Client(server.address, retry=NO_RETRY) as client:
        return list(client.generate_many(prompts, **options))


def collect_in_loop(server, prompts, **options):
    """Return the outcomes of prompts by the client for asyncio."""

    async def run():
        async with AsyncClient(server.address, retry=NO_RETRY) as client:
            return [one async for one in client.generate_many(prompts, **options)]

    return asyncio.run(run())


@pytest.mark.parametrize("run", [collect, collect_in_loop])
class TestOutcomes:
    def test_outcomes_come_in_the_order_of_the_prompts(self, server, run):
        """
        Each prompt is sent once with the common options, and outcomes keep the prompts' order.
        """
        items = [{"prompt": prompt, "request_id": prompt} for prompt in PROMPTS]
        outcomes = run(server, items, concurrency=4, max_tokens=7)
        assert PROMPTS == [one.request_id for one in outcomes]
        assert {ANSWER} == {one.text for one in outcomes}
        assert sorted(PROMPTS) == sorted(request.text for request in server.seen.generate)
        assert {7} == {request.stopping.max_tokens for request in server.seen.generate}

    def test_prompt_that_fails_yields_its_error(self, server, run):
        """
        A refusal, an option that cannot be sent and one with a wrong name are outcomes in their
        places; the other prompts go on.
        """
        server.play(Act(), Act(accept=False, error=NeverFits("too big")), Act())
        items = ["a", "b", {"prompt": "c", "max_tokens": -1}, {"prompt": "d", "tempature": 1}, "e"]
        outcomes = run(server, items, concurrency=1)
        kinds = [Completion, NeverFits, InvalidParameter, InvalidParameter, Completion]
        assert kinds == [type(one) for one in outcomes]
        assert "Did you mean 'temperature'?" in str(outcomes[3])

    def test_item_overrides_the_common_options(self, server, run):
        """
        An option of one prompt wins over the common one, and ids stand instead of a text.
        """
        items = [{"prompt": "a", "seed": 2}, {"token_ids": [1, 2]}]
        run(server, items, concurrency=1, seed=1)
        assert [2, 1] == [request.sampling.seed for request in server.seen.generate]
        assert [1, 2] == list(server.seen.generate[1].token_ids.ids)

    def test_prompts_are_taken_as_they_are_needed(self, server, run):
        """
        An endless source of prompts is read only so far ahead as requests can run.
        """
        taken = []

        def endless():
            while True:
                taken.append(len(taken))
                if len(taken) > 50:
                    raise RuntimeError("read too far")
                yield "hi"

        if run is collect:
            with Client(server.address) as client:
                outcomes = client.generate_many(endless(), concurrency=2)
                assert ANSWER == next(outcomes).text
                outcomes.close()
        else:

            async def first():
                async with AsyncClient(server.address) as client:
                    outcomes = client.generate_many(endless(), concurrency=2)
                    assert ANSWER == (await anext(outcomes)).text
                    await outcomes.aclose()

            asyncio.run(first())
        assert 4 == len(taken)

    def test_wrong_common_option_is_refused_at_once(self, server, run):
        """
        Common options are checked before any request is sent.
        """
        for wrong, error in (
            ({"tempature": 1}, TypeError),
            ({"max_tokens": -1}, InvalidParameter),
            ({"concurrency": 0}, InvalidParameter),
        ):
            with pytest.raises(error):
                run(server, PROMPTS, **wrong)
        assert [] == server.seen.generate


class TestCancellation:
    def test_break_out_of_the_loop_cancels_what_runs(self, server):
        """
        Leaving a loop over the outcomes ends the requests that run, and starts no other.
        """
        server.play(Act(), Act(num_tokens=2, hang=True))

        def first_alone():
            yield PROMPTS[0]
            wait_until(lambda: server.seen.generate, "the first request, which gets the first act")
            yield from PROMPTS[1:]

        with Client(server.address) as client:
            for outcome in client.generate_many(first_alone(), concurrency=2):
                assert ANSWER == outcome.text
                assert server.seen.hanging.wait(PATIENCE_S)
                break
            assert server.seen.cancelled.wait(PATIENCE_S)
            assert len(server.seen.generate) <= 4
        assert not [one for one in threading.enumerate() if "generate_many" in one.name]

    async def test_cancelled_task_cancels_what_runs(self, server):
        """
        Cancelling the task that reads the outcomes cancels their requests.
        """
        server.play(Act(num_tokens=2, hang=True))
        async with AsyncClient(server.address) as client:

            async def read():
                async for _ in client.generate_many(PROMPTS, concurrency=2):
                    pass

            task = asyncio.create_task(read())
            assert await asyncio.to_thread(server.seen.hanging.wait, PATIENCE_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(server.seen.cancelled.wait, PATIENCE_S)

    async def test_task_takes_prompts_of_an_asynchronous_source(self, server):
        """
        Prompts may come from an asynchronous iterator.
        """

        async def source():
            for prompt in ("a", "b"):
                yield prompt

        async with AsyncClient(server.address) as client:
            texts = [one.text async for one in client.generate_many(source())]
        assert [ANSWER, ANSWER] == texts

    def test_threads_have_the_context_of_the_caller(self, server):
        """
        A function for metadata sees the context variables of the code that reads the outcomes.
        """
        span = contextvars.ContextVar("span", default="none")
        span.set("mine")
        with Client(server.address) as client:
            traced = client.with_options(metadata=lambda: {"traceparent": span.get()})
            list(traced.generate_many(["a", "b"], concurrency=2))
        assert ["mine", "mine"] == [one["traceparent"] for one in server.seen.metadata]


class TestPolicy:
    def test_overload_is_retried_for_each_prompt(self, server):
        """
        Each prompt recovers by the client's policy, as one that is sent alone.
        """
        server.play(Act(accept=False, error=QueueFull("full", retry_after_s=0.0)), Act())
        with Client(server.address) as client:
            assert [ANSWER] == [one.text for one in client.generate_many(["a"])]
        assert 2 == len(server.seen.generate)


class TestEndInTheMainThread:
    def test_items_are_cancelled_before_the_stream_that_they_share_ends(self):
        """
        A main thread that wants no more outcomes leaves the cancels of what runs, and then the end
        of the shared stream, to another thread.
        """
        acts, begun, is_over = SimpleQueue(), threading.Event(), threading.Event()

        class Call:
            def __iter__(self):
                begun.set()
                is_over.wait(PATIENCE_S)
                return iter(())

            def cancel(self):
                acts.put(("item", threading.current_thread()))
                is_over.set()

        def start(item):
            if item == "refused":
                raise NeverFits("too big")
            return GenerationStream(lambda *_: Call(), pb.GenerateRequest(), NO_RETRY, None)

        shared = SimpleNamespace(close=lambda: acts.put(("stream", threading.current_thread())))
        outcomes = in_threads(start, ["refused", "runs"], 2, shared)
        next(outcomes)
        assert begun.wait(PATIENCE_S)
        outcomes.close()

        first, by = acts.get(timeout=PATIENCE_S)
        seen = [by]
        while (act := acts.get(timeout=PATIENCE_S))[0] != "stream":
            seen.append(act[1])
        assert "item" == first
        assert threading.main_thread() not in {*seen, act[1]}
