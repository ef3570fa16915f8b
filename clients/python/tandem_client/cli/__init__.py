"""The command line `tandem`; `tandem --help` lists its commands."""

import contextlib
import os
import signal
import sys
from importlib.util import find_spec
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Run the command that the arguments name."""
    # Loading takes a moment and needs no clean-up: Ctrl-C during it ends the process silently.
    signal.signal(signal.SIGINT, _leave)
    # Services start as `python -m`: Python must not take a folder of the same name in the current
    # directory for the service.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    # gRPC's C library would write its notes on connections between our lines.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if find_spec("typer") is None:
        sys.stderr.write("tandem: the command needs more: pip install 'tandem-client[cli]'\n")
        sys.exit(2)
    from tandem_client.cli import app  # noqa: PLC0415  # see above

    try:
        try:
            app.main()
        except SystemExit as end:
            if end.code != INTERRUPTED:
                raise
            _leave_interrupted()
    except KeyboardInterrupt:  # another one, while the command or we dealt with the first
        _leave_interrupted()


def _leave_interrupted() -> None:
    """
    End the process after Ctrl-C without freeing its objects.

    Signals often come twice: from an impatient user, or from a wrapper that passes on what its
    whole process group gets. The second may meet the closing of a channel, and Python would wait
    for ever for a call of that channel when it frees the channel. The server learns from the closed
    connection that its requests were cancelled.
    """
    signal.signal(signal.SIGINT, _leave)
    for stream in (sys.stdout, sys.stderr):
        # A full disk; closed before, or not there at all.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(INTERRUPTED)


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


__all__ = ["main"]
