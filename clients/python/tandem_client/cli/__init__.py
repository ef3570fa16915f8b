"""The command line, `tandem`: `tandem --help` lists what it can do."""

import os
import signal
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Run the command that the arguments name."""
    # Loading takes a moment and leaves nothing to clean up: Ctrl-C then just ends it, in silence.
    signal.signal(signal.SIGINT, _leave)
    # Services start as `python -m`: a folder named like one of them, where the user happens to be,
    # must not be what is started.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    # gRPC's own library writes what it notices about connections between our lines.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from tandem_client.cli import app  # noqa: PLC0415 -- see above

    app.main()


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


__all__ = ["main"]
