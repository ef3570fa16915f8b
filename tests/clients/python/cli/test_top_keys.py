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
from tandem_client.cli.top.keys import Keyboard, split
from tests.clients.python.cli.test_top_screen import request
from tests.clients.python.terminal import COLOURS, SIZE
from tests.waiting import wait_until

ANSWER_S = 30.0
OTHER_KEYS = {
    "F1": "\x1bOP",
    "F2": "\x1bOQ",
    "F2 of VT220": "\x1b[12~",
    "F2 of Linux": "\x1b[[B",
    "F5": "\x1b[15~",
    "Shift-F2": "\x1b[1;2Q",
    "Ctrl-right": "\x1b[1;5C",
    "Ctrl-left": "\x1b[1;5D",
    "Alt-up": "\x1b\x1b[A",
    "Alt-p": "\x1bp",
    "Alt-q": "\x1bq",
}
"""Keys without a meaning, and what terminals send for them."""


class Screen:
    """
    `tandem top` with a terminal for its output, and its input if it `reads`, in a session of its
    own.
    """

    def __init__(self, address: str, *, reads: bool = True) -> None:
        self.side, self._terminal = pty.openpty()
        self.before = termios.tcgetattr(self._terminal)
        flags = ["top", "--interval-s", "0.1", "--admin-address", address]
        # Signals are obeyed, though these tests may run under nohup.
        # A session's first process that opens a terminal has it as its own, as a shell's would.
        start = (
            "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
            "os.close(os.open(os.ttyname(0), os.O_RDWR)); "
            + ("" if reads else "os.close(0); ")
            + "os.execv(sys.executable, [sys.executable, '-m', 'tandem_client', *sys.argv[1:]])"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, *flags],
            stdin=self._terminal,
            stdout=self._terminal,
            stderr=self._terminal,
            env=os.environ | SIZE,
            start_new_session=True,
        )
        os.set_blocking(self.side, False)
        self.raw = b""

    def until(self, text: str) -> str:
        """Read what is shown until a text comes, and return all since the last call."""
        wait_until(lambda: text in self._shown(), f"{text!r} on the screen")
        shown, self.raw = self._shown(), b""
        return shown

    def press(self, keys: str) -> None:
        os.write(self.side, keys.encode())

    def end(self) -> int:
        """Return the exit code, and keep what was shown until then."""
        wait_until(self._has_ended, "the end")
        self._drain()
        return self.process.returncode

    def settings(self) -> list[object]:
        return termios.tcgetattr(self._terminal)

    def change(self, settings: list[object]) -> None:
        termios.tcsetattr(self._terminal, termios.TCSANOW, settings)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(ANSWER_S)
        os.close(self.side)
        os.close(self._terminal)

    def _has_ended(self) -> bool:
        self._drain()  # else it might wait to write more
        return self.process.poll() is not None

    def _shown(self) -> str:
        """Return what is shown since the last call of `until`, without colours."""
        self._drain()
        return COLOURS.sub(b"", self.raw).decode(errors="replace")

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self.side, 4096):
                self.raw += piece


@pytest.fixture
def screen(server):
    found = Screen(server.address)
    yield found
    found.close()


@pytest.fixture
def terminal(monkeypatch):
    """The other side of a terminal that is stdin, with this process in its foreground."""
    side, stdin = pty.openpty()
    with os.fdopen(stdin) as file:
        monkeypatch.setattr("sys.stdin", file)
        monkeypatch.setattr("os.tcgetpgrp", lambda _: os.getpgrp())
        yield side
    os.close(side)


class TestControls:
    def test_sorting_goes_through_the_orders_and_back(self):
        """
        Key s shows the largest of the next order first, and the left arrow the order before.
        """
        requests = (request(1, age_s=5.0), request(2, age_s=9.0), request(3, age_s=7.0))
        controls = Controls()
        assert requests == controls.shown(requests)
        controls.press("s", len(requests))
        assert ("age", [9.0, 7.0, 5.0]) == (
            controls.order,
            [one.age_s for one in controls.shown(requests)],
        )
        controls.press("left", len(requests))
        assert requests == controls.shown(requests)

    def test_scrolling_stays_within_the_requests(self):
        """
        Down shows later requests up to the last one, and up earlier ones up to the first.
        """
        requests = tuple(request(number) for number in range(3))
        controls = Controls()
        for _ in range(9):
            controls.press("down", len(requests))
        assert requests[2:] == controls.shown(requests)
        controls.press("up", len(requests))
        assert requests[1:] == controls.shown(requests)
        for _ in range(9):
            controls.press("up", len(requests))
        assert requests == controls.shown(requests)

    def test_first_request_stays_one_that_is_there(self):
        """
        With fewer requests the last of them is the first one shown, and up shows the one before it.
        """
        requests = tuple(request(number) for number in range(9))
        controls = Controls()
        for _ in range(6):
            controls.press("down", len(requests))
        controls.fit(2)
        assert requests[1:2] == controls.shown(requests[:2])
        controls.press("up", 2)
        assert requests[:2] == controls.shown(requests[:2])

    @pytest.mark.parametrize("key", ["Q", "P"])
    def test_capitals_do_nothing(self, key):
        """
        A capital letter, which ends sequences of terminals, neither leaves nor pauses.
        """
        controls = Controls()
        controls.press(key, 1)
        assert (False, False) == (controls.is_leaving, controls.is_paused)


class TestSplit:
    def test_keys_that_come_at_once_are_told_apart(self):
        """
        Arrows of both modes of a terminal and plain keys are split.
        """
        assert (["up", "s", "left", "q"], "") == split("\x1b[As\x1bODq")

    @pytest.mark.parametrize("sequence", OTHER_KEYS.values(), ids=OTHER_KEYS)
    def test_sequence_of_another_key_is_swallowed_whole(self, sequence):
        """
        No part of what a key without a meaning sends is a key.
        """
        assert (["down", "s"], "") == split(f"\x1b[B{sequence}s")

    @pytest.mark.parametrize("sequence", OTHER_KEYS.values(), ids=OTHER_KEYS)
    def test_beginning_of_a_sequence_is_kept(self, sequence):
        """
        A sequence that is cut anywhere gives no key, and is swallowed once its rest is there.
        """
        for at in range(1, len(sequence)):
            keys, unfinished = split("s" + sequence[:at])
            assert (["s"], sequence[:at]) == (keys, unfinished)
            assert (["q"], "") == split(unfinished + sequence[at:] + "q")


class TestKeyboard:
    def test_sequence_in_two_reads_is_one_key(self, terminal):
        """
        F2 and an arrow that come in two parts are no other keys.
        """
        with Keyboard() as keyboard:
            for parts, expected in ((("\x1bO", "Qs"), ["s"]), (("\x1b", "[A"), ["up"])):
                os.write(terminal, parts[0].encode())
                assert [] == keyboard.wait(ANSWER_S)
                os.write(terminal, parts[1].encode())
                assert expected == keyboard.wait(ANSWER_S)

    def test_escape_alone_ends_with_a_pause(self, terminal):
        """
        A key that comes some time after Escape has its own meaning.
        """
        with Keyboard() as keyboard:
            os.write(terminal, b"\x1b")
            assert [] == keyboard.wait(ANSWER_S)
            assert [] == keyboard.wait(0.0)
            os.write(terminal, b"q")
            assert ["q"] == keyboard.wait(ANSWER_S)

    def test_background_reads_no_keys_and_leaves_the_terminal(self, terminal, monkeypatch):
        """
        In the background keys are another process's, and so are the settings of the terminal.
        """
        with Keyboard() as keyboard:
            monkeypatch.setattr("os.tcgetpgrp", lambda _: os.getpgrp() + 1)
            cbreak = termios.tcgetattr(terminal)
            os.write(terminal, b"q")
            assert [] == keyboard.wait(0.0)
        assert cbreak == termios.tcgetattr(terminal)

    def test_no_stdin_has_no_keys(self, monkeypatch):
        """
        A program that was started without a stdin is without a keyboard.
        """
        monkeypatch.setattr("sys.stdin", None)
        with Keyboard() as keyboard:
            assert (False, []) == (keyboard.is_terminal, keyboard.wait(0.0))


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
        A key is obeyed at once, though a snapshot waits for its answer.
        """
        screen.until("q quits")
        server.seen.answers_polls.clear()
        screen.until("has not answered")
        screen.press("q")
        assert 0 == screen.end()
        server.seen.answers_polls.set()

    def test_function_keys_change_nothing(self, screen):
        """
        F1, F2, F5, Alt-p and Alt-q neither pause nor leave; the next key is obeyed.
        """
        screen.until("q quits")
        screen.press("\x1bOP\x1bOQ\x1b[15~\x1bp\x1bqs")
        assert "PAUSED" not in screen.until("by age")
        screen.press("q")
        assert 0 == screen.end()

    def test_keys_come_at_once_again_after_a_stop(self, screen):
        """
        After Ctrl-Z, a shell that changes the terminal, and fg, a key needs no line end.
        """
        screen.until("q quits")
        cbreak = screen.settings()
        screen.process.send_signal(signal.SIGSTOP)
        os.waitpid(screen.process.pid, os.WUNTRACED)
        screen.change(screen.before)
        screen.process.send_signal(signal.SIGCONT)
        screen.press("s")
        screen.until("by age")
        assert cbreak == screen.settings()
        screen.press("q")
        assert 0 == screen.end()
        assert screen.before == screen.settings()

    def test_command_without_stdin_shows_all_the_same(self, server):
        """
        With a stdin that is closed there is a picture without keys, and Ctrl-C ends it.
        """
        screen = Screen(server.address, reads=False)
        try:
            assert "q quits" not in screen.until("policy lpm")
            screen.process.send_signal(signal.SIGINT)
            assert 130 == screen.end()
            assert b"Traceback" not in screen.raw
        finally:
            screen.close()
