"""On which thread a loop turns: on one at a time, and on the one that has the news in its hand."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from scheduler_svc.service.wakeup import Wakeup


class HasFileno(Protocol):
    """What can be polled."""

    def fileno(self) -> int:
        """The descriptor; readable when a turn is called for."""


class Turns:
    """
    Makes the turns of a loop, whose state changes hands between threads with a lock.

    One thread polls, with `poll_and_turn`. Any other makes a turn with `turn_now` for what it has
    just got, so that nobody has to be woken for it: that costs more than most turns do. Only the
    polling thread clears the wakeup, and only it raises.

    Attributes:
        count: Turns made; read by whoever watches the loop.
        made_by: Id of the thread that makes one, or made the last.
    """

    def __init__(
        self, turn: Callable[[], float], *, sources: Iterable[HasFileno], wakeup: Wakeup
    ) -> None:
        """
        Args:
            turn: Does all there is to do; gives when the next turn must come if nothing does, in
                seconds on the clock that `poll_and_turn` is given waits of.
            sources: What calls for turns besides the wakeup.
            wakeup: Wakes the polling thread.
        """
        self._turn = turn
        self._wakeup = wakeup
        self._poller = select.poll()
        for source in (*sources, wakeup):
            self._poller.register(source.fileno(), select.POLLIN)
        self._lock = threading.Lock()
        self._due_s = 0.0
        self._has_ended = False
        self._broken: Exception | None = None
        """What ended a turn of another thread: the polling one raises it."""
        self.polls_until_s = 0.0
        """When the polling thread makes the next turn if nothing wakes it."""
        self.count = 0
        self.made_by = 0

    def poll_and_turn(self, wait_s: float) -> None:
        """Wait for something to do, at most so long, and do all there is."""
        self._poller.poll(int(max(0.0, wait_s) * 1000 + 0.999))
        self._wakeup.clear()
        with self._lock:
            if self._broken is not None:
                raise self._broken
            self._make()
            self.polls_until_s = self._due_s

    def turn_now(self) -> None:
        """Do all there is on this thread; where another one turns, soon on the polling thread."""
        if not self._lock.acquire(blocking=False):
            self._wakeup.set()
            return
        try:
            if not self._has_ended and self._broken is None:
                self._make()
        except Exception as error:  # noqa: BLE001  # the polling thread raises it
            self._broken = error
        finally:
            if self._due_s < self.polls_until_s or self._broken is not None:
                self._wakeup.set()
            self._lock.release()

    def end(self) -> None:
        """Make no more turns, whoever calls for them."""
        with self._lock:
            self._has_ended = True

    def _make(self) -> None:
        self.count += 1
        self.made_by = threading.get_ident()
        self._due_s = self._turn()
