"""Remarks beside an output that stands in the middle of a line, on terminals and elsewhere."""

from __future__ import annotations

import pytest

from tandem.errors import HandedOver, InternalError
from tests.clients.python.fake_server import ANSWER, PATIENCE_S, Act

BLOCKED = "an operator suspended it: go on with tandem resume"


class TestTerminal:
    @pytest.mark.slow
    def test_remark_in_the_middle_of_a_line_begins_a_new_one(self, terminal, server):
        """
        A reason to wait after a stream has begun stands on a line of its own, once.
        """
        server.play(Act(num_tokens=5, blocked_by=BLOCKED, hang=True))
        command = terminal("generate", "hi", "--address", server.address)
        assert f"{ANSWER[:5]}\r\n[waiting: {BLOCKED}]\r\n" == command.until("resume]\r\n")

    def test_text_goes_on_below_the_remark(self, terminal, server):
        """
        A stream that broke and was resumed goes on on the line after the remark.
        """
        server.play(Act(num_tokens=5, error=HandedOver("it stops", retry_after_s=0.0)), Act())
        lines = terminal("generate", "hi", "--address", server.address).until(None).split("\r\n")
        assert ANSWER[:5] == lines[0]
        assert lines[1].startswith("[the server is stopping: looking for a server to go on")
        assert ANSWER[5:] == lines[2]
        assert "output tokens" in lines[3]

    def test_error_in_the_middle_of_a_line_begins_a_new_one(self, terminal, server):
        """
        A stream that fails leaves its text on one line and the reason on the next.
        """
        server.play(Act(num_tokens=5, error=InternalError("a bug")))
        shown = terminal("generate", "hi", "--address", server.address).until(None)
        assert f"{ANSWER[:5]}\r\ntandem: INTERNAL: a bug\r\n" == shown

    def test_other_stderr_changes_nothing_on_stdout(self, terminal, server):
        """
        Stdout has the text alone, and stderr whole lines, when stderr is no terminal.
        """
        server.play(Act(num_tokens=5, error=InternalError("a bug")))
        command = terminal("generate", "hi", "--address", server.address, shares=False)
        assert ANSWER[:5] == command.until(None)
        _, errors = command.process.communicate(timeout=PATIENCE_S)
        assert b"tandem: INTERNAL: a bug\n" == errors
