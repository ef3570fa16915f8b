"""Calls of streams that can be given up while they stand still at a scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

GIVEN_UP = "the scheduler serves no requests and the stream stood still"


class WatchedCall:
    """
    One call of a stream, which the stream's reader iterates and cancels at its end. After
    `give_up` the reader finds it broken, as after the death of its scheduler.

    Attributes:
        num_messages: Number of messages that were read.
    """

    def __init__(self, call: Any, on_end: Callable[[WatchedCall], None]) -> None:
        """
        Args:
            call: gRPC's call.
            on_end: Called when the reader has ended with the call; may be called again.
        """
        self.num_messages = 0
        self._call = call
        self._on_end = on_end
        self._is_given_up = False

    def cancel(self) -> None:
        """End the call; safe to call more than once."""
        self._call.cancel()
        self._on_end(self)

    def give_up(self) -> None:
        """Break the call off, for its reader to go on elsewhere."""
        self._is_given_up = True
        self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for message in self._call:
                self.num_messages += 1
                yield message
        except asyncio.CancelledError:
            # gRPC raises this for its own cancel() and for a cancelled task alike.
            task = asyncio.current_task()
            if not self._is_given_up or (task is not None and task.cancelling()):
                raise
            none = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, none, none, GIVEN_UP, GIVEN_UP
            ) from None


class WatchedCalls:
    """Calls that run at one scheduler."""

    def __init__(self) -> None:
        self._seen: dict[WatchedCall, int] = {}
        """Messages of each call at the last look; -1 before the first."""

    def __len__(self) -> int:
        return len(self._seen)

    def watch(self, call: Any) -> WatchedCall:
        """Return gRPC's call as one that can be given up."""
        watched = WatchedCall(call, self._forget)
        self._seen[watched] = -1
        return watched

    def look(self, *, give_up: bool) -> None:
        """
        Note how far each call is.

        Args:
            give_up: True: give up those that have no new message since the last look.
        """
        for call, before in list(self._seen.items()):
            if give_up and call.num_messages == before:
                call.give_up()
            self._seen[call] = call.num_messages

    def _forget(self, call: WatchedCall) -> None:
        self._seen.pop(call, None)
