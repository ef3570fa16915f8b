"""Turns of batches at the event loop: one piece of their work at a time, and others in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from scheduler_svc.frontend.calls.call_line import CallLine

PIECE_S = 0.001
"""Seconds of work after which a piece is over; less than what a `CallWindow` counts as late."""
BEGUN_PER_PIECE = 2
"""Most items that begin in a piece: each is checked and tokenized in the next turn of the loop."""


class Piece:
    """Work that one batch does in its turn; it is to ask between two items whether it is over."""

    __slots__ = ("_began_s", "_clock", "_num_begun")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = clock()
        self._num_begun = 0

    def note_begun(self) -> None:
        """Note that an item begins, whose own work comes in the next turn of the loop."""
        self._num_begun += 1

    @property
    def spent_s(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began_s

    @property
    def is_over(self) -> bool:
        """True once the batch is to wait for its next turn."""
        return self._num_begun >= BEGUN_PER_PIECE or self.spent_s >= PIECE_S


class ItemTurns:
    """
    Turns of all batches of a frontend. Owned by the event loop.

    A message of a batch may have as much work as a thousand calls: items to begin or to refuse, or
    their events to encode. A call passes about eight turns of the event loop before its first
    token, and would wait for all of that work in each. So in one turn of the loop one batch does
    one piece; tenants take turns, and each one's batches do. None waits while this turn has had no
    piece.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """
        Args:
            clock: Monotonic clock.
        """
        self._clock = clock
        self._line: CallLine[asyncio.Future[None]] = CallLine()
        """Batches that wait; a future that is done is one whose batch has gone."""
        self._is_taken = False
        """True if there was a piece already in this turn of the loop."""

    async def next(self, caller: Hashable) -> Piece:
        """Wait for the turn of a batch of this caller, which takes turns with others."""
        if self._is_taken or len(self._line):
            turn = asyncio.get_running_loop().create_future()
            self._line.add(caller, turn)
            await turn
        else:
            self._give()
        return Piece(self._clock)

    def _give(self) -> None:
        self._is_taken = True
        asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        """Give this turn of the loop to the next batch that still waits."""
        self._is_taken = False
        while (turn := self._line.take(lambda _: True)) is not None:
            if not turn.done():
                turn.set_result(None)
                self._give()
                return
