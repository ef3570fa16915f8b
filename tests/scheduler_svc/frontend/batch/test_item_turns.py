"""Turns of batches at the event loop: much work of one of them does not keep others waiting."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from scheduler_svc.config.frontend_security import FrontendSecurity
from scheduler_svc.frontend.batch.item import Item
from scheduler_svc.frontend.batch.item_turns import BEGUN_PER_PIECE, PIECE_S, ItemTurns
from scheduler_svc.frontend.batch.stream import BatchStream
from scheduler_svc.frontend.serving import RequestServing
from tandem.inference.v1 import inference_service_pb2 as pb
from tests.scheduler_svc.frontend.batch.test_generate_batch import Stream, finish
from tests.scheduler_svc.frontend.fake_core import (
    Clock,
    Frontend,
    model,
    running_frontend,
    serve,
    until,
    within,
)
from tests.scheduler_svc.frontend.identity.credentials import USER, bearer, write_file

NUM_ITEMS = 200


class LoopTurns:
    """Number of the turn that the event loop makes, and what was counted in each."""

    def __init__(self) -> None:
        self.now = 0
        self.counts: Counter[int] = Counter()
        self._task = asyncio.create_task(self._count())

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.now += 1

    def count(self) -> None:
        self.counts[self.now] += 1

    def stop(self) -> None:
        self._task.cancel()


@pytest.fixture
async def loop_turns() -> AsyncIterator[LoopTurns]:
    turns = LoopTurns()
    yield turns
    turns.stop()


@pytest.fixture
async def small(tmp_path: Path, model_dir: Path) -> AsyncIterator[Frontend]:
    """A frontend whose core has eight places, and whose callers need credentials."""
    security = FrontendSecurity(tokens_file=str(write_file(tmp_path)))
    async with running_frontend(tmp_path, security=security, max_num_seqs=8) as frontend:
        await serve(frontend, model(model_dir))
        yield frontend


@pytest.fixture
def long_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let more time pass at each look at the clock than a piece of work may take."""

    def tick(clock: Clock) -> float:
        clock.lead_s += 2 * PIECE_S
        return clock.lead_s

    monkeypatch.setattr(Clock, "__call__", tick)


def watch(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: Callable[[object], None]
) -> None:
    """Call `after` with the object after each call of a method."""
    method = getattr(owner, name)

    def watched(self: object, *args: object, **options: object) -> object:
        result = method(self, *args, **options)
        after(self)
        return result

    monkeypatch.setattr(owner, name, watched)


class TestTurns:
    async def test_batches_that_work_at_once_have_a_turn_of_the_loop_each(self, loop_turns):
        """
        In one turn of the event loop one batch does one piece of work.
        """
        turns = ItemTurns(lambda: 0.0)

        async def work() -> None:
            for _ in range(3):
                await turns.next("tenant")
                loop_turns.count()

        await asyncio.gather(*(work() for _ in range(10)))
        assert 30 == loop_turns.counts.total()
        assert 1 == max(loop_turns.counts.values())

    async def test_tenants_alternate_however_many_batches_one_has(self):
        """
        A tenant's batch waits for one piece of each other tenant, not for all of its batches.
        """
        turns, order = ItemTurns(lambda: 0.0), []

        async def work(tenant: str) -> None:
            for _ in range(3):
                await turns.next(tenant)
                order.append(tenant)

        await asyncio.gather(*(work(tenant) for tenant in [*["greedy"] * 20, "polite"]))
        assert 3 == order[:7].count("polite")

    async def test_batch_that_is_alone_waits_for_the_next_turn_only_after_a_piece(self, loop_turns):
        """
        The first piece begins at once, and the next one in the next turn of the loop.
        """
        turns, times = ItemTurns(lambda: 0.0), [loop_turns.now]
        for _ in range(2):
            await turns.next("tenant")
            times.append(loop_turns.now)
        assert times[0] == times[1] < times[2]

    async def test_batch_that_has_gone_is_passed_over(self):
        """
        A batch whose call ended while it waited leaves its turn to the next one.
        """
        turns = ItemTurns(lambda: 0.0)
        tasks = [asyncio.create_task(turns.next("tenant")) for _ in range(6)]
        await asyncio.sleep(0)
        for task in tasks[1:4]:
            task.cancel()
        ended = await within(asyncio.gather(*tasks, return_exceptions=True))
        gone = [isinstance(one, asyncio.CancelledError) for one in ended]
        assert [False, True, True, True, False, False] == gone

    async def test_piece_is_over_after_its_time(self):
        """
        A piece ends once it has taken `PIECE_S`.
        """
        now_s = 5.0
        piece = await ItemTurns(lambda: now_s).next("tenant")
        assert not piece.is_over
        now_s += PIECE_S
        assert piece.is_over
        assert pytest.approx(PIECE_S) == piece.spent_s

    async def test_piece_is_over_after_some_items_began(self):
        """
        An item that begins has its work yet to come, so a piece has few of them.
        """
        piece = await ItemTurns(lambda: 5.0).next("tenant")
        for _ in range(BEGUN_PER_PIECE):
            assert not piece.is_over
            piece.note_begun()
        assert piece.is_over


class TestItems:
    async def test_items_of_a_message_begin_a_few_per_turn_of_the_loop(
        self, frontend, monkeypatch, loop_turns
    ):
        """
        However many items one message adds, and over however many streams, a turn of the event loop
        prepares a few of them: other calls go on in between.
        """
        watch(monkeypatch, type(frontend.client), "submit", lambda _: loop_turns.count())
        streams = [Stream(frontend.channel) for _ in "12"]
        for stream in streams:
            await stream.add(*range(NUM_ITEMS))
        await until(lambda: 2 * NUM_ITEMS == len(frontend.client.streams))
        assert 2 * NUM_ITEMS == loop_turns.counts.total()
        assert 2 * BEGUN_PER_PIECE >= max(loop_turns.counts.values())
        for stream in streams:
            stream.call.cancel()

    async def test_events_of_many_items_are_encoded_a_piece_per_turn_of_the_loop(
        self, frontend, monkeypatch, loop_turns, long_items
    ):
        """
        Where the events of an item take long to encode, others go on after each, and the message
        still has those of all.
        """
        stream = Stream(frontend.channel)
        await stream.add(*range(NUM_ITEMS))
        ids = [await frontend.core.accept() for _ in range(NUM_ITEMS)]
        await stream.read()
        watch(monkeypatch, Item, "events", lambda _: loop_turns.count())
        for stream_id in ids:
            await finish(frontend, stream_id, [70])
        await stream.until_over(*range(NUM_ITEMS))
        assert 1 == max(loop_turns.counts.values())
        assert NUM_ITEMS > stream.num_messages
        await within(stream.call.done_writing())
        await stream.rest()

    async def test_wrong_message_ends_the_call_while_items_have_output(self, frontend, monkeypatch):
        """
        A call's error does not wait until its items have nothing to send.
        """
        stream = Stream(frontend.channel)
        await stream.add(1)
        stream_id, num_tokens = await frontend.core.accept(), 0

        async def rest(batch: BatchStream, _seconds: float) -> None:
            nonlocal num_tokens
            if num_tokens < NUM_ITEMS:
                await frontend.core.tokens(stream_id, num_tokens, [70])
                num_tokens += 1
                await until(lambda: batch._line)

        monkeypatch.setattr(BatchStream, "_rest", rest)
        await stream.read()
        await within(stream.call.write(pb.GenerateBatchRequest(cancel=[2])))
        assert "cancel[0]" == (await stream.failure()).field
        assert NUM_ITEMS > num_tokens

    async def test_cancels_of_a_message_are_heeded_a_piece_per_turn_of_the_loop(
        self, frontend, monkeypatch, loop_turns, long_items
    ):
        """
        However many items one message cancels, others go on in between.
        """
        stream = Stream(frontend.channel)
        await stream.add(*range(NUM_ITEMS))
        for _ in range(NUM_ITEMS):
            await frontend.core.accept()
        watch(monkeypatch, RequestServing, "cancel", lambda _: loop_turns.count())
        await within(stream.call.write(pb.GenerateBatchRequest(cancel=range(NUM_ITEMS))))
        await until(lambda: NUM_ITEMS == loop_turns.counts.total())
        assert 1 == max(loop_turns.counts.values())
        stream.call.cancel()

    @pytest.mark.slow
    async def test_refused_items_are_told_before_more_are_refused(
        self, small, monkeypatch, long_items
    ):
        """
        A message with thousands of items beyond a tenant's share leaves no more of them in memory
        than a piece of work refuses.
        """
        num_refused = []
        watch(monkeypatch, BatchStream, "_add", lambda one: num_refused.append(len(one._refused)))
        stream = Stream(small.channel, metadata=bearer(USER))
        await stream.add(*range(1000))
        await stream.until_over(*range(8, 1000))
        assert (1000, 1) == (len(num_refused), max(num_refused))
        assert {"QUEUE_FULL"} == {stream.error(item).reason for item in range(8, 1000)}
        stream.call.cancel()

    @pytest.mark.slow
    async def test_refused_items_leave_nothing_to_the_collector(self, small):
        """
        A refused item is freed once the client was told: a collection of thousands would stop all
        calls.
        """
        stream = Stream(small.channel, metadata=bearer(USER))
        await stream.add(*range(8))
        taken = [await within(small.core.submits.get()) for _ in range(8)]
        gc.collect()
        gc.disable()
        try:
            await stream.add(*range(8, 1000))
            await stream.until_over(*range(8, 1000))
            await until(lambda: len(taken) >= sum(isinstance(o, Item) for o in gc.get_objects()))
        finally:
            gc.enable()
        stream.call.cancel()
