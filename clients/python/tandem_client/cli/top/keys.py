"""Keys that are pressed at a terminal, one by one and without an echo."""

from __future__ import annotations

import os
import select
import sys
import time
from typing import Any, Self

try:
    import termios
    import tty
except ImportError:  # not on Windows, where the picture has no keys
    HAS_TERMIOS = False
else:
    HAS_TERMIOS = True

NAMES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1bOC": "right",
    "\x1bOD": "left",
}
"""Names of what a terminal sends for arrows, in its two modes."""


class Keyboard:
    """
    Stdin as a keyboard, from entry to exit; the terminal is then as it was before.

    Attributes:
        is_there: True if stdin is a terminal and this process is in its foreground: others would
            be stopped by it. Without one no key is ever pressed.
    """

    def __init__(self) -> None:
        self.is_there = False
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        """Ask the terminal for each key at once; Ctrl-C and Ctrl-Z keep their meaning."""
        try:
            self._input = sys.stdin.fileno()
            self.is_there = (
                HAS_TERMIOS and os.isatty(self._input) and os.tcgetpgrp(self._input) == os.getpgrp()
            )
        except (OSError, ValueError):  # stdin is closed, or no file, or another session's terminal
            return self
        if self.is_there:
            self._before = termios.tcgetattr(self._input)
            tty.setcbreak(self._input, termios.TCSANOW)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the terminal back as it was."""
        if self.is_there:
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> list[str]:
        """Return the keys that are pressed, by name or as they are; none after `seconds`."""
        if not self.is_there:
            time.sleep(seconds)
            return []
        if not select.select([self._input], [], [], seconds)[0]:
            return []
        pressed = os.read(self._input, 256).decode(errors="replace")
        if not pressed:  # the terminal hung up
            self.is_there = False
        return split(pressed)


def split(pressed: str) -> list[str]:
    """Return what a terminal sent as single keys."""
    keys = []
    while pressed:
        size = 3 if pressed[:3] in NAMES else 1
        keys.append(NAMES.get(pressed[:size], pressed[:size]))
        pressed = pressed[size:]
    return keys
