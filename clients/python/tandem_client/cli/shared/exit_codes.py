"""Exit codes of the commands; this module imports little, so that `tandem --help` is quick."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """
    Exit code of a command, besides 0 for success.

    FAILED: Any other failure. USAGE: Flags, files, configuration or model are wrong.
    UNAVAILABLE: The server cannot be reached, or cannot serve now. REFUSED: The request is wrong,
    or the server cannot do it as it was started or in its present state. OVERLOADED:
    The server has no room now. CANCELLED: The deadline passed or the call was cancelled.
    INTERRUPTED: Ctrl-C. TERMINATED: SIGTERM or SIGHUP.
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
