"""Who goes on next, when more streams have something to send than can be sent at once."""

from __future__ import annotations

import asyncio
from collections import deque

STREAMS_PER_ROUND = 16
"""About a millisecond's work."""


class Turns:
    """
    Lets waiting streams go on in the order in which they asked, a few per round of the event loop.

    The loop looks for new calls, the core's messages and health checks once per round. With a turn
    for every stream in each, a thousand busy streams keep a new call waiting for half a minute.
    Streams that wait for their turn lose nothing: what comes meanwhile is merged.
    """

    def __init__(self, per_round: int = STREAMS_PER_ROUND) -> None:
        self._per_round = per_round
        self._waiting: deque[asyncio.Future[None]] = deque()

    def give(self, waiter: asyncio.Future[None]) -> None:
        """Finish this future when its turn comes, unless it is cancelled before."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._round)
        self._waiting.append(waiter)

    def _round(self) -> None:
        waiting = self._waiting
        for _ in range(min(self._per_round, len(waiting))):
            waiter = waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
        if waiting:
            asyncio.get_running_loop().call_soon(self._round)


class Bell:
    """Something happened: rung any number of times, it wakes its one listener once, in turn."""

    __slots__ = ("_is_rung", "_turns", "_waiter")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._is_rung = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_rung(self) -> bool:
        """Whether the listener has not gone on yet since it was rung last."""
        return self._is_rung

    def ring(self) -> None:
        """Have the listener go on, now or when it next listens."""
        if not self._is_rung:
            self._is_rung = True
            if self._waiter is not None:
                self._turns.give(self._waiter)

    async def wait(self) -> None:
        """Return when it was rung since the last time, and the turn has come."""
        self._waiter = asyncio.get_running_loop().create_future()
        if self._is_rung:
            self._turns.give(self._waiter)
        try:
            await self._waiter
        finally:
            self._waiter = None
        self._is_rung = False
