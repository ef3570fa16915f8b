"""Turns (iterations) of a loop, one at a time, each on the thread that has the news for it."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from scheduler_svc.service.wakeup import Wakeup


class HasFileno(Protocol):
    """Object with a file descriptor that can be polled."""

    def fileno(self) -> int:
        """Return the descriptor, which is readable when a turn is needed."""


class LoopTurns:
    """
    Turns of a loop; a lock guards the loop's state between threads.

    One thread polls, with `poll_and_turn`. Any other thread calls `turn_now` to make a turn for
    what it has just received, so that the polling thread need not be woken: waking it costs more
    than most turns do. Only the polling thread clears the wakeup, and only it raises.

    Attributes:
        count: Number of turns begun; read by the thread that watches the loop.
        made_by: Id of the thread that makes the current turn, or made the last one.
        is_polled: True in a turn that the polling thread makes for what it has waited for, which
            may be news of `sources`; other turns are for the news of the thread that makes them.
        polls_until_s: Time at which the polling thread makes the next turn if nothing wakes it.
    """

    def __init__(
        self, turn: Callable[[], float], *, sources: Iterable[HasFileno], wakeup: Wakeup
    ) -> None:
        """
        Args:
            turn: Makes one turn; returns the time at which the next one is due if no event comes,
                in seconds on the clock by which the caller computes the waits of `poll_and_turn`.
            sources: Sockets that need a turn when they are readable, besides the wakeup.
            wakeup: Wakes the polling thread.
        """
        self._turn = turn
        self._wakeup = wakeup
        self._poller = select.poll()
        for source in (*sources, wakeup):
            self._poller.register(source.fileno(), select.POLLIN)
        self._lock = threading.Lock()
        self._is_asked_for = False
        """True while a thread has news for which no turn has begun yet."""
        self._due_s = 0.0
        self._has_ended = False
        self._broken: Exception | None = None
        """Exception that ended a turn of another thread: the polling thread raises it."""
        self.polls_until_s = 0.0
        self.count = 0
        self.made_by = 0
        self.is_polled = False

    def poll_and_turn(self, wait_s: float) -> None:
        """Wait at most `wait_s` seconds for an event and make one turn."""
        self._poller.poll(int(max(0.0, wait_s) * 1000 + 0.999))
        self._wakeup.clear()
        with self._lock:
            if self._broken is not None:
                raise self._broken
            self._is_asked_for = False
            self.is_polled = True
            try:
                self._make()
            finally:
                self.is_polled = False
            self.polls_until_s = self._due_s
        if self._is_asked_for:
            self.turn_now()

    def turn_now(self) -> None:
        """
        Make a turn on this thread; if another thread is making one, let it make one more.

        So no thread that has news is kept waiting or wakes another one: with several executors,
        results often come while the turn for another's is being made.
        """
        self._is_asked_for = True
        # The thread that held the lock looks again after it lets go: no news waits for ever.
        while self._is_asked_for and self._lock.acquire(blocking=False):
            try:
                self._is_asked_for = False
                if not self._has_ended and self._broken is None:
                    self._make()
            except Exception as error:  # noqa: BLE001  # the polling thread raises it
                self._broken = error
            finally:
                if self._due_s < self.polls_until_s or self._broken is not None:
                    self._wakeup.set()
                self._lock.release()

    def end(self) -> None:
        """Make no more turns: `turn_now` does nothing from now on."""
        with self._lock:
            self._has_ended = True

    def _make(self) -> None:
        self.count += 1
        self.made_by = threading.get_ident()
        self._due_s = self._turn()
