"""Order in which streams go on, when more have something to send than can be sent at once."""

from __future__ import annotations

import asyncio
from collections import deque

STREAMS_AT_ONCE = 32
PATIENCE_S = 0.005
"""Shortest time, in seconds, for which a stream that does not come back counts as sending."""


class StreamTurns:
    """
    Turns of streams that have news: they go on in the order in which they asked, a few at once.

    gRPC has one queue for two kinds of events, that a message was taken and that a call arrived,
    and it accepts one new call per pass of that queue. With a message of every stream in the queue,
    a new call waited for half a minute beside six hundred busy streams. A stream that waits for its
    turn loses no output: the news that arrives meanwhile is merged. A stream that waits for its
    client counts as sending only in the period in which it went on and in the next one.
    """

    def __init__(self, at_once: int = STREAMS_AT_ONCE, patience_s: float = PATIENCE_S) -> None:
        self._at_once = at_once
        self._patience_s = patience_s
        self._waiting: deque[Bell] = deque()
        self._period = 0
        self._num_sent = 0
        """Number of streams that went on in this period and have not come back."""
        self._num_sent_before = 0
        """Number of those of the period before; streams out for longer are not counted."""
        self._timer: asyncio.TimerHandle | None = None

    def ask(self, bell: Bell) -> None:
        """Let the bell's listener go on when its turn comes."""
        self._waiting.append(bell)
        self._go_on()

    def came_back(self, period: int) -> None:
        """Note that a listener, which went on in this period, has sent its news."""
        if period == self._period:
            self._num_sent -= 1
        elif period == self._period - 1:
            self._num_sent_before -= 1
        self._go_on()

    def _go_on(self) -> None:
        waiting = self._waiting
        while waiting and self._num_sent + self._num_sent_before < self._at_once:
            self._num_sent += waiting.popleft().go_on(self._period)
        if waiting and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._patience_s, self._begin_period)

    def _begin_period(self) -> None:
        self._timer = None
        self._period += 1
        self._num_sent, self._num_sent_before = 0, self._num_sent
        self._go_on()


class Bell:
    """Event with one listener: rung any number of times, it wakes the listener once, in turn."""

    __slots__ = ("_is_rung", "_period", "_turns", "_waiter")

    def __init__(self, turns: StreamTurns) -> None:
        self._turns = turns
        self._is_rung = False
        self._waiter: asyncio.Future[None] | None = None
        self._period: int | None = None

    def ring(self) -> None:
        """Let the listener go on in turn, now or when it next waits."""
        if not self._is_rung:
            self._is_rung = True
            if self._waiter is not None:
                self._turns.ask(self)

    async def wait(self) -> None:
        """Wait until the bell was rung since the last time and the turn has come."""
        self._waiter = asyncio.get_running_loop().create_future()
        if self._period is not None:
            period, self._period = self._period, None
            self._turns.came_back(period)
        if self._is_rung:
            self._turns.ask(self)
        try:
            await self._waiter
        finally:
            self._waiter = None
        self._is_rung = False

    def go_on(self, period: int) -> bool:
        """Wake the listener, as its turn has come; return False if it no longer waits."""
        if self._waiter is None or self._waiter.done():
            return False
        self._period = period
        self._waiter.set_result(None)
        return True
