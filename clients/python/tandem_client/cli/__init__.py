"""The command line `tandem`; `tandem --help` lists its commands."""

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

    app.main()


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


__all__ = ["main"]
