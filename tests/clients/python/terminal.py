"""Commands at a terminal of their own."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

from tests.clients.python.fake_server import PATIENCE_S

COLOURS = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")
"""Colours and moves of the cursor."""
SIZE = {"COLUMNS": "200", "LINES": "40", "TERM": "xterm"}


class Terminal:
    """A command with one terminal for stdout, and stderr if `shares`; reads what it shows."""

    def __init__(self, *arguments: str, shares: bool = True) -> None:
        self._reader, screen = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tandem_client", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=screen if shares else subprocess.PIPE,
            env=os.environ | SIZE,
        )
        os.close(screen)

    def until(self, text: str | None) -> str:
        """Return all that was shown until a text came, or until the end of the command."""
        while text is None or text not in self.shown:
            try:
                piece = os.read(self._reader, 4096)
            except OSError:  # Linux says so where nothing writes to a terminal any more
                piece = b""
            if not piece:
                break
            self.shown += COLOURS.sub(b"", piece).decode()
        return self.shown

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)
        os.close(self._reader)
