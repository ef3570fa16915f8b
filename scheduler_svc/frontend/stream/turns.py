"""Who goes on next, when more streams have something to send than can be sent at once."""

from __future__ import annotations

import asyncio
from collections import deque

STREAMS_AT_ONCE = 32
PATIENCE_S = 0.005
"""How long, at least, a stream that does not come back counts as one that is busy sending."""


class Turns:
    """
    Lets streams that have news go on in the order in which they asked, a few at once.

    gRPC tells one by one, in one queue, that messages were taken and that calls arrive, and takes
    up one new call per pass of that queue. With a message of every stream in it, a new call waited
    for half a minute beside six hundred busy streams. Who waits for its turn loses nothing: what
    comes meanwhile is merged. A stream that waits for its client does not count for long.
    """

    def __init__(self, at_once: int = STREAMS_AT_ONCE, patience_s: float = PATIENCE_S) -> None:
        self._at_once = at_once
        self._patience_s = patience_s
        self._waiting: deque[Bell] = deque()
        self._period = 0
        self._num_sent = 0
        """On their way since this period."""
        self._num_sent_before = 0
        """Since the one before; who is out for longer is not counted."""
        self._timer: asyncio.TimerHandle | None = None

    def ask(self, bell: Bell) -> None:
        """Have its listener go on when its turn comes."""
        self._waiting.append(bell)
        self._go_on()

    def came_back(self, period: int) -> None:
        """A listener that went on in this period is done with what it had."""
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
    """Something happened: rung any number of times, it wakes its one listener once, in turn."""

    __slots__ = ("_is_rung", "_period", "_turns", "_waiter")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._is_rung = False
        self._waiter: asyncio.Future[None] | None = None
        self._period: int | None = None

    @property
    def is_rung(self) -> bool:
        """Whether the listener has not gone on yet since it was rung last."""
        return self._is_rung

    def ring(self) -> None:
        """Have the listener go on, now or when it next listens."""
        if not self._is_rung:
            self._is_rung = True
            if self._waiter is not None:
                self._turns.ask(self)

    async def wait(self) -> None:
        """Return when it was rung since the last time, and the turn has come."""
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
        """The turn has come; False if nobody waits any more."""
        if self._waiter is None or self._waiter.done():
            return False
        self._period = period
        self._waiter.set_result(None)
        return True
