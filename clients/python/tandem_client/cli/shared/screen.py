"""Output of commands: results on stdout, unchanged; remarks on stderr, in lines of their own."""

from __future__ import annotations

import sys
import threading

import typer


class _Screen:
    """
    The terminal, with the knowledge of whether its cursor is in the middle of a line. Remarks may
    come from another thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_in_line = False

    def write(self, text: str) -> None:
        """Write output and flush it."""
        with self._lock:
            sys.stdout.write(text)
            sys.stdout.flush()
            if text:
                self._is_in_line = not text.endswith("\n")

    def remark(self, line: str, *, is_dim: bool) -> None:
        """Write a line for the user; it begins a new line if both streams are terminals."""
        with self._lock:
            if self._is_in_line and sys.stdout.isatty() and sys.stderr.isatty():
                line = line if line.startswith("\n") else f"\n{line}"
                self._is_in_line = False
            typer.secho(line, err=True, dim=is_dim or None)


_screen = _Screen()


def write(text: str) -> None:
    """Write a piece of a command's output to stdout, unchanged, and flush it."""
    _screen.write(text)


def remark(line: str, *, is_dim: bool = True) -> None:
    """Write a line for the user to stderr; on a terminal it begins a line of its own."""
    _screen.remark(line, is_dim=is_dim)
