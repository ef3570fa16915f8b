"""Finding out that a loop no longer turns, from a thread that the loop cannot hold up."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from typing import NoReturn

import structlog

LIVE_WITHIN_S = 30.0
"""A loop that has not turned for so long makes liveness fail."""
EXIT_AFTER_S = 60.0
"""After so long its process ends itself, for whoever has no orchestrator to end it."""
LOOK_INTERVAL_S = 1.0
"""How often a watch looks."""
LONGEST_LOOK_S = 3.0
"""What passed between two looks counts up to here: then the watch itself was stopped, or the whole
machine asleep, and the loop had no chance to turn."""
LAST_WORD_S = 2.0
"""How long the log may take: whoever reads it may be what the loop hangs on."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class TickWatch:
    """
    Judges one loop by a number that grows with its turns. Pure: time is an argument.

    Attributes:
        silent_s: For how long the loop has not turned while the watch could look.
    """

    def __init__(self, now: float) -> None:
        self._looked_s = now
        self._num_turns = -1
        self.silent_s = 0.0

    def look(self, num_turns: int, now: float) -> float:
        """Take note of the loop's number; returns `silent_s`."""
        if num_turns != self._num_turns:
            self._num_turns = num_turns
            self.silent_s = 0.0
        else:
            self.silent_s += min(now - self._looked_s, LONGEST_LOOK_S)
        self._looked_s = now
        return self.silent_s


def exit_stuck(loop: str, thread_id: int | None) -> NoReturn:
    """End this process with 1, after saying in the log where the thread of its loop hangs."""
    frame = sys._current_frames().get(thread_id or 0)  # noqa: SLF001  # the documented way
    where = "" if frame is None else "".join(traceback.format_stack(frame))
    say = threading.Thread(
        target=lambda: _log.error("loop_stuck", loop=loop, silent_s=EXIT_AFTER_S, where=where),
        daemon=True,
    )
    say.start()
    say.join(LAST_WORD_S)
    os._exit(1)
