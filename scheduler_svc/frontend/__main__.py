"""The frontend process; started by the core process, which holds the other end of its stdin."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run one frontend and return its exit code."""
    # Terminals signal the whole process group, but the parent decides when frontends stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from scheduler_svc.frontend.run import run  # noqa: PLC0415  # takes a while; see above
    from tandem.process.process_start import run_or_refuse  # noqa: PLC0415

    return run_or_refuse(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
