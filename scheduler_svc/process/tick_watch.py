"""Watchdog of a loop, for a thread that the loop cannot block."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from typing import NoReturn

import structlog

LIVE_WITHIN_S = 30.0
"""Seconds without a turn of the loop after which liveness fails."""
EXIT_AFTER_S = 60.0
"""Seconds without a turn after which the process exits, in case no orchestrator ends it."""
LOOK_INTERVAL_S = 1.0
"""Seconds from one look of a watch to the next."""
LONGEST_LOOK_S = 3.0
"""
Most seconds that count between two looks: where more passed, the watch itself was stopped or the
machine was asleep, and the loop had no chance to turn.
"""
LAST_WORD_S = 2.0
"""Most seconds to wait for the last log line: the loop may hang on the log's reader itself."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class TickWatch:
    """
    Watchdog of one loop, by a number that grows with its turns. Pure: time is an argument.

    Attributes:
        silent_s: Seconds for which the loop has not turned while the watch could look.
    """

    def __init__(self, now: float) -> None:
        self._looked_s = now
        self._num_turns = -1
        self.silent_s = 0.0

    def look(self, num_turns: int, now: float) -> float:
        """Note the loop's number of turns; returns `silent_s`."""
        if num_turns != self._num_turns:
            self._num_turns = num_turns
            self.silent_s = 0.0
        else:
            self.silent_s += min(now - self._looked_s, LONGEST_LOOK_S)
        self._looked_s = now
        return self.silent_s


def exit_stuck(loop: str, thread_id: int | None) -> NoReturn:
    """Exit with code 1, after logging the stack of the loop's thread to show where it hangs."""
    frame = sys._current_frames().get(thread_id or 0)  # noqa: SLF001  # the documented way
    where = "" if frame is None else "".join(traceback.format_stack(frame))
    say = threading.Thread(
        target=lambda: _log.error("loop_stuck", loop=loop, silent_s=EXIT_AFTER_S, where=where),
        daemon=True,
    )
    say.start()
    say.join(LAST_WORD_S)
    os._exit(1)
