"""Output that cannot be written, and text that is none, end commands in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.errors import HandedOver
from tests.clients.python.fake_server import ANSWER, PATIENCE_S, Act

FULL = Path("/dev/full")


def ran(*arguments, stdin=b"", **options):
    """Run a command and return its exit code and what it wrote."""
    outcome = subprocess.run(
        [sys.executable, "-m", "tandem_client", *arguments],
        input=stdin,
        stderr=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=False,
        **({"stdout": subprocess.PIPE} | options),
    )
    return outcome.returncode, outcome.stdout, outcome.stderr.decode()


class TestOutput:
    @pytest.mark.parametrize(
        "command",
        [
            ["generate", "hi"],
            ["generate", "hi", "--json"],
            ["generate", "hi", "--n", "2"],
            ["generate", "hi", "--logprobs", "1"],
            ["chat"],
        ],
        ids=" ".join,
    )
    def test_full_disk_is_one_line(self, server, command):
        """
        A command that cannot write stdout ends with 1 and says so, without a traceback.
        """
        with FULL.open("wb") as full:
            code, _, errors = ran(*command, "--address", server.address, stdin=b"hi\n", stdout=full)

        assert (1, "tandem: cannot write the output: No space left on device") == (
            code,
            errors.splitlines()[-1],
        )
        assert "Traceback" not in errors

    @pytest.mark.parametrize("command", ["--version", "--help", "top --help"])
    def test_full_disk_is_one_line_for_help(self, command):
        """
        Texts that no server is asked for end in the same way on a full disk.
        """
        with FULL.open("wb") as full:
            code, _, errors = ran(*command.split(), stdout=full)
        assert (1, "tandem: cannot write the output: No space left on device\n") == (code, errors)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "command", ["top --once --json", "requests", "requests first", "top --once"]
    )
    def test_full_disk_is_one_line_for_operators(self, server, command):
        """
        Commands that print tables end in the same way on a full disk.
        """
        with FULL.open("wb") as full:
            code, _, errors = ran(*command.split(), "--admin-address", server.address, stdout=full)

        assert (1, "tandem: cannot write the output: No space left on device\n") == (code, errors)

    @pytest.mark.parametrize("command", [["generate", "hi"], ["generate", "hi", "--json"]])
    def test_closed_stdout_is_no_traceback(self, server, command):
        """
        A command with stdout closed before it began does its work without a traceback.
        """
        line = f'exec "{sys.executable}" -m tandem_client "$@" >&-'
        outcome = subprocess.run(
            ["sh", "-c", line, "sh", *command, "--address", server.address],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

        assert (0, 1) == (outcome.returncode, len(server.seen.generate))
        assert "Traceback" not in outcome.stderr

    def test_terminal_without_the_characters_gets_their_codes(self, server):
        """
        A character that stdout's encoding lacks is written as its code.
        """
        server.play(Act(answer="caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{SNOWMAN}"))
        ascii_only = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
        code, output, errors = ran("generate", "hi", "--address", server.address, env=ascii_only)

        assert (0, b"caf\\xe9 \\u2603\n") == (code, output)
        assert "Traceback" not in errors

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("command", "stdin"),
        [(["generate", "-"], b"a\xffb"), (["generate", b"a\xffb"], b"")],
        ids=["stdin", "argument"],
    )
    def test_prompt_that_is_no_text_is_refused(self, server, command, stdin):
        """
        A prompt that is not UTF-8 is refused in one line, and nothing is sent.
        """
        code, _, errors = ran(*command, "--address", server.address, stdin=stdin)

        assert (4, "tandem: INVALID_PARAMETER: text is not valid UTF-8 text\n") == (code, errors)
        assert [] == server.seen.generate

    def test_chat_goes_on_after_text_that_is_none(self, server):
        """
        A line that is not UTF-8 is refused, and the next one is sent.
        """
        code, _, errors = ran("chat", "--address", server.address, stdin=b"a\xffb\nhi\n")

        assert 0 == code
        assert "content is not valid UTF-8 text" in errors
        assert ["hi"] == [m.content for r in server.seen.generate for m in r.chat.messages]


class TestServerThatGoesAway:
    @pytest.mark.slow
    def test_stream_that_cannot_go_on_fails_in_one_line(self, tandem, server):
        """
        A stream that the server ends for good keeps what came, and the line says what happened.
        """
        server.play(
            Act(num_tokens=5, error=HandedOver("it stops", retry_after_s=0.0)),
            Act(accept=False, error=HandedOver("it is gone")),
        )
        process = tandem("generate", "hi", "--address", server.address, "--deadline-s", "2")
        output, errors = process.communicate(timeout=PATIENCE_S)

        assert ANSWER[:5] == output.rstrip("\n")
        assert "looking for a server to go on" in errors
        assert "Traceback" not in errors
        assert process.returncode in {3, 6}
