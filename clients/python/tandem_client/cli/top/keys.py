"""Keys that are pressed at a terminal, one by one and without an echo."""

from __future__ import annotations

import os
import re
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
_SEQUENCE = re.compile(
    r"\x1b++(?:\[(?:\[.|[0-?]*+[ -/]*+[^\[])"  # CSI, and function keys of a Linux console
    r"|O[0-9;]*+."  # SS3
    r"|[^\[O])",  # Alt and a key
    re.DOTALL,
)
"""Sequence of one key that has no character: ECMA-48, section 5.4, and xterm's ctlseqs."""
_MAX_BYTES = 256
"""Most bytes that are read at once."""


class Keyboard:
    """
    Stdin as a keyboard, from entry to exit; the terminal is then as it was before.

    Attributes:
        is_terminal: True if stdin is a terminal and this process was in its foreground at entry:
            others would be stopped by it. Without one no key is ever pressed.
    """

    def __init__(self) -> None:
        self.is_terminal = False
        self._before: list[Any] = []
        self._unfinished = ""
        """Beginning of a sequence whose rest is yet to be read."""

    def __enter__(self) -> Self:
        """Ask the terminal for each key at once; Ctrl-C and Ctrl-Z keep their meaning."""
        if sys.stdin is None:  # the command was started without one
            return self
        try:
            self._input = sys.stdin.fileno()
        except (OSError, ValueError):  # it is closed, or no file
            return self
        self.is_terminal = HAS_TERMIOS and os.isatty(self._input) and self._is_in_foreground()
        if self.is_terminal:
            self._before = termios.tcgetattr(self._input)
            tty.setcbreak(self._input, termios.TCSANOW)
        return self

    def __exit__(self, *_: object) -> None:
        """Give the terminal back as it was; in the background it is another's already."""
        if self.is_terminal and self._is_in_foreground():
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> list[str]:
        """Return the keys that are pressed, by name or as they are; none after `seconds`."""
        if not (self.is_terminal and self._is_in_foreground()):
            time.sleep(seconds)
            return []
        self._ask_again()
        if not select.select([self._input], [], [], seconds)[0]:
            self._unfinished = ""  # it was the Escape key alone
            return []
        pressed = os.read(self._input, _MAX_BYTES).decode(errors="replace")
        if not pressed:  # the terminal hung up
            self.is_terminal = False
        keys, self._unfinished = split(self._unfinished + pressed)
        return keys

    def _is_in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._input) == os.getpgrp()
        except OSError:  # another session's terminal, or one that hung up
            return False

    def _ask_again(self) -> None:
        """Ask for each key at once where a shell has changed that: after Ctrl-Z and fg."""
        if termios.tcgetattr(self._input)[3] & termios.ICANON:
            tty.setcbreak(self._input, termios.TCSANOW)


def split(pressed: str) -> tuple[list[str], str]:
    """
    Split what a terminal sent.

    Returns:
        Single keys, without those of sequences that have no name here; and the beginning of a
        sequence that is not whole yet, or empty.
    """
    keys, at = [], 0
    while at < len(pressed):
        if pressed[at] != "\x1b":
            keys.append(pressed[at])
            at += 1
            continue
        sequence = _SEQUENCE.match(pressed, at)
        if sequence is None:
            return keys, pressed[at:]
        if sequence[0] in NAMES:
            keys.append(NAMES[sequence[0]])
        at = sequence.end()
    return keys, ""
