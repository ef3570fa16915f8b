"""One GenerateBatch call: items come in, and their events go out together."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Hashable

from google.protobuf.unknown_fields import UnknownFieldSet

from scheduler_svc.frontend.batch.item import Item
from scheduler_svc.frontend.batch.item_counts import ItemCounts
from scheduler_svc.frontend.batch.item_turns import ItemTurns, Piece
from scheduler_svc.frontend.calls.call_id import call_id, start_call
from scheduler_svc.frontend.calls.failures import typed_failure
from scheduler_svc.frontend.calls.refusal_lines import RefusalLines
from scheduler_svc.frontend.identity.access import claim
from scheduler_svc.frontend.identity.identity import current_caller
from scheduler_svc.frontend.intake.connection import connection_of
from scheduler_svc.frontend.serving import Context, RequestServing
from scheduler_svc.frontend.stream.shared_write import ItemBell, SharedWrite
from tandem.errors import FeatureUnsupported, InvalidParameter, TandemError
from tandem.inference.v1 import inference_service_pb2 as pb

METHOD = "/tandem.inference.v1.InferenceService/GenerateBatch"
MAX_MESSAGE_BYTES = 1 << 20
"""Most bytes of one response message."""
ITEMS_PER_MESSAGE = 256
"""Most items of one message, however short their events are."""
REST_PER_WORK = 3.0
"""
Seconds without a message per second that the last one took to encode. So one call takes at most a
quarter of the event loop, and under load its items' output is merged instead of sent token by
token; a message of few items takes too little time for its rest to be noticed.
"""
SHORTEST_REST_S, LONGEST_REST_S = 0.002, 0.1
"""Rests that are shorter are left out, longer ones are cut."""


class BatchStream:
    """
    One call. Owned by the event loop: a task reads, one serves each item, the call's own writes.

    What arrives for items while a message is written is merged per item, as on their own streams.
    """

    def __init__(
        self,
        serving: RequestServing,
        counts: ItemCounts,
        turns: ItemTurns,
        context: Context,
        *,
        refusals: RefusalLines,
        max_pending_bytes: int,
    ) -> None:
        """
        Args:
            serving: Serves the requests.
            counts: Numbers of items in flight of all connections and tenants.
            turns: Turns of all batches at the event loop.
            context: The call.
            refusals: Sums up lines about refused calls, of which an item is one.
            max_pending_bytes: Most output of all items that may wait for the client.
        """
        self._serving = serving
        self._counts = counts
        self._turns = turns
        self._context = context
        self._refusals = refusals
        self._connection = connection_of(context.peer(), self)
        self._caller = current_caller.get()
        self._takes_turns_as = self._turn_taker()
        self._write = SharedWrite(max_pending_bytes)
        self._line: deque[ItemBell] = deque()
        """Items with news."""
        self._encoded: deque[tuple[bytes, Item]] = deque()
        """Events that go with the next messages, and their items."""
        self._items: dict[int, Item] = {}
        """Items in flight by number."""
        self._refused: dict[int, Item] = {}
        """Items that were refused before they were in flight, until that was sent."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_number = -1
        self._is_half_closed = False
        self._failure: Exception | None = None
        self._something = asyncio.Event()
        self._none_refused = asyncio.Event()

    def _turn_taker(self) -> Hashable:
        """Return its tenant; its connection where a tenant is known of no call or only of items."""
        if self._caller is None or self._caller.is_delegate:
            return self._connection
        return self._caller.identity.tenant

    async def _turn(self) -> Piece:
        return await self._turns.next(self._takes_turns_as)

    def ring(self) -> None:
        """Look for something to send, or for the end of the service."""
        self._something.set()

    async def run(self, requests: AsyncIterator[pb.GenerateBatchRequest]) -> None:
        """
        Serve the call until it is complete.

        Raises:
            TandemError: The client sent what cannot be, is too slow, or the service ends.
        """
        self._begin(self._read(requests))
        try:
            with self._serving.core.streams.watched(self._write):
                await self._send()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(
        self, work: Coroutine[None, None, None], context: contextvars.Context | None = None
    ) -> None:
        task = asyncio.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, requests: AsyncIterator[pb.GenerateBatchRequest]) -> None:
        try:
            async for message in requests:
                await self._take(message)
                await self._until_none_is_refused()
            self._is_half_closed = True
        except Exception as error:  # noqa: BLE001  # goes on in the call's own task
            self._failure = error
        self.ring()

    async def _take(self, message: pb.GenerateBatchRequest) -> None:
        _check_known(message, "")
        piece = await self._turn()
        for at, one in enumerate(message.add):
            if piece.is_over:
                await self._until_none_is_refused()
                piece = await self._turn()
            _check_known(one, f"add[{at}]")
            if one.item <= self._last_number:
                raise InvalidParameter(
                    f"item numbers must grow: {one.item} came after {self._last_number}.",
                    field=f"add[{at}].item",
                )
            self._last_number = one.item
            self._add(one, piece)
        for at, number in enumerate(message.cancel):
            if piece.is_over:
                piece = await self._turn()
            if number > self._last_number:
                raise InvalidParameter(f"no item {number} was added.", field=f"cancel[{at}]")
            item = self._items.get(number)
            if item is not None and not item.is_cancelled:
                item.is_cancelled = True
                if item.output is not None:
                    self._serving.cancel(item.output.inbox)

    async def _until_none_is_refused(self) -> None:
        """Let a client that adds more than it may read why before it can add on."""
        while self._refused:
            self._none_refused.clear()
            await self._none_refused.wait()

    def _add(self, one: pb.BatchItem, piece: Piece) -> None:
        item = Item(one.item, self._line, self.ring, self._write)
        try:
            self._counts.enter(self._connection, self._caller)
        except TandemError as error:
            self._refused[item.number] = item
            item.request_id = one.request.request_id
            item.fail(error)
            return
        self._items[item.number] = item
        item.log_context = contextvars.copy_context()
        piece.note_begun()
        self._begin(self._serve(item, one.request), item.log_context)

    async def _serve(self, item: Item, request: pb.GenerateRequest) -> None:
        start_call(self._context.invocation_metadata())
        item.request_id = call_id()
        try:
            if self._caller is not None:
                claim(request, self._caller.identity)
            left_s = self._context.time_remaining()
            async with self._serving.serve(
                request, rpc="GenerateBatch", left_s=left_s, bell=item.bell
            ) as output:
                item.request_id = call_id()
                item.output = output
                self._write.inboxes.add(output.inbox)
                try:
                    if item.is_cancelled:
                        self._serving.cancel(output.inbox)
                    item.bell.ring()  # in case that news came before there was an output
                    await item.over.wait()
                finally:
                    self._write.inboxes.discard(output.inbox)
        except Exception as error:  # noqa: BLE001  # a bug costs one item only, and is logged
            item.request_id = call_id()
            item.fail(typed_failure(error, METHOD, self._refusals))
        finally:
            if item.is_ended or item.failure is None:
                self._leave(item)

    def _leave(self, item: Item) -> None:
        if self._items.pop(item.number, None) is not None:
            self._counts.leave(self._connection, self._caller)
            self.ring()

    async def _send(self) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            while (self._encoded or self._line) and self._failure is None:
                events, encoding_s = await self._next_events()
                if not events:
                    continue
                await self._serving.write(
                    self._write, b"".join([event for event, _ in events]), self._context
                )
                self._note_sent(events)
                del events  # it holds its items, and the next ones may come in an hour
                await self._rest(rest_after(encoding_s))
            if self._failure is not None:
                raise self._failure
            if not (self._items or self._refused):
                if self._is_half_closed:
                    return
                refusal = self._serving.core.refusal
                if refusal is not None:
                    raise refusal

    @staticmethod
    async def _rest(seconds: float) -> None:
        if seconds:
            await asyncio.sleep(seconds)

    async def _next_events(self) -> tuple[list[tuple[bytes, Item]], float]:
        """
        Return the events of the next message, with their items, and the seconds that encoding them
        took; none if no item of the line has an event that is due.
        """
        encoded, line = self._encoded, self._line
        events: list[tuple[bytes, Item]] = []
        num_bytes = num_items = 0
        spent_s, piece = 0.0, await self._turn()
        while True:
            while encoded:
                num_bytes += len(encoded[0][0])
                if num_bytes > MAX_MESSAGE_BYTES and events:
                    return events, spent_s + piece.spent_s
                events.append(encoded.popleft())
            if not line or num_items == ITEMS_PER_MESSAGE:
                return events, spent_s + piece.spent_s
            if piece.is_over:
                spent_s += piece.spent_s
                piece = await self._turn()
            num_items += 1
            number = line.popleft().item
            item = self._items.get(number) or self._refused.get(number)
            if item is not None:
                for event in self._events_of(item):
                    encoded.append((event, item))  # a generator costs more than its one event

    def _events_of(self, item: Item) -> list[bytes]:
        try:
            return item.events()
        except Exception as error:  # noqa: BLE001  # a bug costs one item only, and is logged
            context = item.log_context or contextvars.copy_context()
            item.fail(context.run(typed_failure, error, METHOD, self._refusals))
            return item.events()

    def _note_sent(self, events: list[tuple[bytes, Item]]) -> None:
        now_s = self._serving.clock()
        pending = {item.number for _, item in self._encoded}
        for _, item in events:
            if item.output is not None:
                item.output.inbox.last_sent_s = now_s
            if item.is_ended and item.number not in pending:
                item.over.set()
                self._refused.pop(item.number, None)
                if item.failure is not None:
                    self._leave(item)
        if not self._refused:
            self._none_refused.set()


def rest_after(encoding_s: float) -> float:
    """Return the seconds to wait with the next message after one that took this long to encode."""
    rest_s = REST_PER_WORK * encoding_s
    return min(rest_s, LONGEST_REST_S) if rest_s >= SHORTEST_REST_S else 0.0


def _check_known(message: pb.GenerateBatchRequest | pb.BatchItem, path: str) -> None:
    """
    Refuse a message that itself has a field which this version of the contract lacks; that of a
    request in it is the affair of its item.

    Raises:
        FeatureUnsupported: It has one.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise FeatureUnsupported(
            f"{path or message.DESCRIPTOR.name} has a field of number "
            f"{unknown[0].field_number}, which this server does not know.",
            field=path,
        )
