"""The console: `python -m tandem_console --help`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from tandem.installation import install_command
from tandem.process.exit_codes import EXIT_REFUSED
from tandem.process.process_start import end_quietly_on_signals, run_or_refuse

NEEDED = ("starlette", "uvicorn")


def main() -> int:
    """Run one console; return its exit code."""
    end_quietly_on_signals()
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.stderr.write(f"the console needs {', '.join(missing)}: {install_command('console')}\n")
        return EXIT_REFUSED
    from tandem_console.run import run  # noqa: PLC0415  # takes a while, see above

    return run_or_refuse(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
