"""`python -m executor_svc`: read settings, serve, stop on SIGTERM."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Ctrl-C ends the process in silence from here on: the imports below take a moment.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import sys
from collections.abc import Sequence

from tandem.process.process_start import end_quietly_on_signals, run_or_refuse


def main(argv: Sequence[str] | None = None) -> int:
    """Run one executor process and return its exit code."""
    end_quietly_on_signals()
    from executor_svc.run import run  # noqa: PLC0415  # takes a while, in which Ctrl-C may come

    return run_or_refuse(lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
