"""Keys of `tandem top`, and the terminal after it."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import termios

import pytest

from tandem_client.cli.top.controls import HELP, Controls
from tandem_client.cli.top.keys import split
from tests.clients.python.cli.test_top_screen import request
from tests.clients.python.terminal import COLOURS, SIZE

ANSWER_S = 30.0


class Screen:
    """`tandem top` with a terminal for its input and output, in a session of its own."""

    def __init__(self, address: str) -> None:
        self.side, self._terminal = pty.openpty()
        self.before = termios.tcgetattr(self._terminal)
        flags = ["top", "--interval-s", "0.1", "--admin-address", address]
        # A session's first process that opens a terminal has it as its own, as a shell's would.
        start = (
            "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); "
            "os.execv(sys.executable, [sys.executable, '-m', 'tandem_client', *sys.argv[1:]])"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, *flags],
            stdin=self._terminal,
            stdout=self._terminal,
            stderr=self._terminal,
            env=os.environ | SIZE,
            start_new_session=True,
        )
        self.raw = b""

    def until(self, text: str) -> str:
        """Read what is shown until a text comes, and return all since the last call."""
        while text not in COLOURS.sub(b"", self.raw).decode(errors="replace"):
            self.raw += os.read(self.side, 4096)
        shown, self.raw = self.raw, b""
        return COLOURS.sub(b"", shown).decode(errors="replace")

    def press(self, keys: str) -> None:
        os.write(self.side, keys.encode())

    def end(self) -> int:
        """Return the exit code, and keep what was shown until then."""
        os.set_blocking(self.side, False)
        while self.process.poll() is None:
            self._drain()
        self._drain()
        return self.process.returncode

    def settings(self) -> list[object]:
        return termios.tcgetattr(self._terminal)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(ANSWER_S)
        os.close(self.side)
        os.close(self._terminal)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.raw += os.read(self.side, 4096)


@pytest.fixture
def screen(server):
    found = Screen(server.address)
    yield found
    found.close()


class TestControls:
    def test_sorting_goes_through_the_orders_and_back(self):
        """
        Key s shows the largest of the next order first, and the left arrow the order before.
        """
        requests = (request(1, age_s=5.0), request(2, age_s=9.0), request(3, age_s=7.0))
        controls = Controls()
        assert requests == controls.shown(requests)
        controls.press("s")
        assert ("age", [9.0, 7.0, 5.0]) == (
            controls.order,
            [one.age_s for one in controls.shown(requests)],
        )
        controls.press("left")
        assert requests == controls.shown(requests)

    def test_scrolling_stays_within_the_requests(self):
        """
        Down shows later requests up to the last one, and up earlier ones up to the first.
        """
        requests = tuple(request(number) for number in range(3))
        controls = Controls()
        for _ in range(9):
            controls.press("down")
        assert requests[2:] == controls.shown(requests)
        controls.press("up")
        assert requests[1:] == controls.shown(requests)
        for _ in range(9):
            controls.press("up")
        assert requests == controls.shown(requests)

    def test_keys_that_come_at_once_are_told_apart(self):
        """
        Arrows of both modes of a terminal and plain keys are split, and no other sequence quits.
        """
        assert ["up", "s", "left", "q"] == split("\x1b[As\x1bODq")
        assert "q" not in split("\x1b[15~")


class TestKeys:
    def test_keys_change_the_picture_and_q_leaves(self, screen):
        """
        Key ? lists the keys, s names the next order, p pauses; q ends with 0 and gives the terminal back.
        """
        screen.until("q quits")
        assert screen.before != screen.settings()
        screen.press("?")
        assert HELP[0][1] in screen.until("show these keys")
        screen.press("?s")
        screen.until("by age")
        screen.press("p")
        screen.until("PAUSED")
        screen.press("q")
        assert 0 == screen.end()
        assert screen.before == screen.settings()
        assert screen.raw.rstrip().endswith(b"\x1b[?25h")

    @pytest.mark.parametrize(
        ("how", "code"), [("ctrl-c", 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
    )
    def test_terminal_is_given_back_after_a_signal(self, screen, how, code):
        """
        Ctrl-C, SIGTERM and SIGHUP leave the terminal's settings and cursor as they were, and no traceback.
        """
        screen.until("q quits")
        if how == "ctrl-c":
            screen.press("\x03")
        else:
            screen.process.send_signal(how)
        assert code == screen.end()
        assert screen.before == screen.settings()
        assert b"\x1b[?25h" in screen.raw
        assert b"Traceback" not in screen.raw

    def test_refusal_in_the_middle_gives_the_terminal_back(self, screen, server):
        """
        A server that comes to refuse the caller ends the command with its error, at a usable terminal.
        """
        screen.until("q quits")
        server.seen.operator_token = "other"
        assert 4 == screen.end()
        assert screen.before == screen.settings()
        assert b"Traceback" not in screen.raw

    def test_q_leaves_while_the_server_is_silent(self, screen, server):
        """
        A key is obeyed at once, though a look waits for its answer.
        """
        screen.until("q quits")
        server.seen.answers_looks.clear()
        screen.until("has not answered")
        screen.press("q")
        assert 0 == screen.end()
        server.seen.answers_looks.set()
