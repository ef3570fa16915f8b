"""Which executor was the cheapest for the requests at the head of the queue, as plans found it."""

from __future__ import annotations

from collections.abc import Sequence


class Precedents:
    """
    The cheapest executors for the first waiting requests, as of one moment.

    Where requests wait, the plans of all executors ask in turn about the same ones, and each answer
    costs a look at every executor. It holds for the next plan too while no executor has changed and
    both plans have left the same requests to the same executors before. So the first plan of a
    moment asks, and the others look here. Whatever changes an executor's room clears it, through
    `Router.note_change`; a test compares each answer with a new one.
    """

    __slots__ = ("_at_s", "_found")

    def __init__(self) -> None:
        self._at_s = -1.0
        self._found: list[tuple[int, int | None]] = []
        """Numbers of requests, in the order asked, and the cheapest executor for each."""

    def at(self, now: float) -> None:
        """Forget what was found at another time."""
        if now != self._at_s:
            self._at_s = now
            self.clear()

    def clear(self) -> None:
        """Forget all, as an executor is no longer what it was."""
        self._found.clear()

    def find(self, position: int, request: int) -> Sequence[int | None]:
        """Return the executor that was found for a request in this position; empty without one."""
        if position < len(self._found) and self._found[position][0] == request:
            return self._found[position][1:]
        return ()

    def note(self, position: int, request: int, executor: int | None) -> None:
        """Note what was found for a request in this position, in place of all from there on."""
        del self._found[position:]
        self._found.append((request, executor))
