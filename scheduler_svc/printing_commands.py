"""What the commands that print their results have in common: how they end when they cannot."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


def run_printing(name: str, command: Callable[[], int]) -> int:
    """
    Run a command that prints to stdout, and give its exit code.

    Ctrl-C ends it with 130 and a reader that left with 1, both without a word; output that cannot
    be written, on a full disk say, ends it with one line and 1.

    Args:
        name: What the line starts with.
        command: Does the work and gives the exit code.
    """
    try:
        code = command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _forget_output()
        return EXIT_FAILED
    except OSError as error:
        _forget_output()
        what = f"{error.filename}: " if error.filename else "cannot write the output: "
        sys.stderr.write(f"{name}: {what}{error.strerror or error}\n")
        return EXIT_FAILED
    return code


def _forget_output() -> None:
    """Else Python would fail once more when it writes at exit what is still in the buffer."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
