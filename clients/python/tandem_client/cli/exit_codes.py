"""What commands exit with; loads nothing, so that `tandem --help` is quick."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """
    What a command exits with, besides 0.

    FAILED: Something else went wrong. USAGE: Flags, files, configuration or model.
    UNAVAILABLE: No server can be reached, or it cannot serve now. REFUSED: The server found the
    request wrong, or cannot do it as it was started or while something else goes on. OVERLOADED:
    The server has no room now. CANCELLED: Deadline passed or the call was cancelled. INTERRUPTED:
    Ctrl-C. TERMINATED: SIGTERM or SIGHUP.
    """

    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 3
    REFUSED = 4
    OVERLOADED = 5
    CANCELLED = 6
    INTERRUPTED = 130
    TERMINATED = 143


EXIT_CODES_HELP = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage, configuration or model, 3 server unavailable, "
    "4 request refused, 5 server overloaded, 6 deadline passed, 130 interrupted."
)
