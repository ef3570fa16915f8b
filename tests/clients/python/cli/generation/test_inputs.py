"""Inputs of `tandem generate`, and its output as lines of JSON."""

from __future__ import annotations

import json
import os

import pytest

from tandem_client.cli.generation.inputs import prompt_of
from tests.clients.python.fake_server import ANSWER

TURNS = [{"role": "system", "content": "be\nbrief"}, {"role": "user", "content": "hello"}]


class TestMessages:
    @pytest.mark.parametrize(
        "text",
        [json.dumps(TURNS), json.dumps(TURNS, indent=1), "\n".join(map(json.dumps, TURNS))],
        ids=["list", "indented", "lines"],
    )
    def test_file_is_the_conversation(self, run, server, tmp_path, text):
        """
        --messages takes a JSON list and a message per line, from a file and from stdin.
        """
        path = tmp_path / "chat.json"
        path.write_text(text)
        for where in (str(path), "-"):
            result = run("generate", "--messages", where, "--address", server.address, stdin=text)
            assert (0, f"{ANSWER}\n") == (result.exit_code, result.stdout)
        for sent in server.seen.generate:
            roles = [(one.role, one.content) for one in sent.chat.messages]
            assert [("system", "be\nbrief"), ("user", "hello")] == roles

    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (("hi",), "--messages stands instead of a prompt"),
            (("--token-ids", "1"), "--token-ids stands instead of a prompt, --messages"),
        ],
    )
    def test_second_prompt_is_refused(self, run, server, tmp_path, arguments, line):
        """
        A conversation has no other prompt beside it.
        """
        path = tmp_path / "chat.json"
        path.write_text("[]")
        command = ("generate", "--messages", str(path), *arguments)
        result = run(*command, "--address", server.address)
        assert (2, []) == (result.exit_code, server.seen.generate)
        assert line in result.stderr

    def test_file_that_is_no_json_is_named(self, run, server, tmp_path):
        """
        A file that is no JSON ends the command with its place, a missing one with its name.
        """
        path = tmp_path / "chat.json"
        missing = run("generate", "--messages", str(path), "--address", server.address)
        assert (2, True) == (missing.exit_code, "chat.json" in missing.stderr)
        path.write_text('{"role": "user", "content": "a"}\nnonsense\n')
        wrong = run("generate", "--messages", str(path), "--address", server.address)
        assert 2 == wrong.exit_code
        assert "chat.json:2 is not JSON" in wrong.stderr


@pytest.fixture
def piped(monkeypatch):
    """Make stdin a pipe, and yield the end that is written to."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin, os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr("sys.stdin", stdin)
        yield stdout


class TestPipe:
    def test_text_that_was_not_asked_for_is_told(self, piped, capsys):
        """
        A prompt without - leaves the text of a pipe alone, and stderr says so and what reads it.
        """
        print("a long text", file=piped, flush=True)
        assert "summarise" == prompt_of(["summarise"])
        line = 'tandem: stdin was not read; to add its text: tandem generate "..." -\n'
        assert line == capsys.readouterr().err

    @pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closed"])
    def test_empty_pipe_is_not_waited_for(self, piped, capsys, is_closed):
        """
        A pipe without text, as of a service manager or a script, is no reason for a line.
        """
        if is_closed:
            piped.close()
        assert "summarise" == prompt_of(["summarise"])
        assert "" == capsys.readouterr().err

    def test_text_that_was_asked_for_is_read(self, piped, capsys):
        """
        With - the text follows the prompt, without a line on stderr.
        """
        piped.write("a long text")
        piped.close()
        assert "summarise\n\na long text" == prompt_of(["summarise", "-"])
        assert "" == capsys.readouterr().err


class TestLogitBias:
    def test_biases_reach_the_server(self, run, server):
        """
        Each --logit-bias is an entry of the request.
        """
        flags = ("--logit-bias", "3=1.5", "--logit-bias", "7=-100")
        assert 0 == run("generate", "hi", *flags, "--address", server.address).exit_code
        (sent,) = server.seen.generate
        assert {3: 1.5, 7: -100.0} == dict(sent.sampling.logit_bias)

    @pytest.mark.parametrize("word", ["3", "a=1", "3=x", "=1"])
    def test_other_forms_are_refused(self, run, server, word):
        """
        A bias without an id or a number is a usage error.
        """
        result = run("generate", "hi", "--logit-bias", word, "--address", server.address)
        assert (2, []) == (result.exit_code, server.seen.generate)
        assert "--logit-bias takes ID=BIAS" in result.stderr


class TestNdjson:
    def test_each_event_is_a_line(self, run, server):
        """
        --ndjson prints every event with its kind, and nothing else.
        """
        result = run("generate", "hi", "--ndjson", "--n", "2", "--address", server.address)
        events = [json.loads(line) for line in result.stdout.splitlines()]
        assert (0, "") == (result.exit_code, result.stderr)
        assert ["started", "queued", "delta"] == [one["event"] for one in events[:3]]
        assert ["finished", "finished", "done"] == [one["event"] for one in events[-3:]]
        assert "STOP_STRING" == events[-2]["reason"]
        pieces = [one["text"] for one in events if one["event"] == "delta" and not one["choice"]]
        assert ANSWER == "".join(pieces)


class TestCompletion:
    @pytest.mark.parametrize(
        ("words", "completed"),
        [("tandem gen", "generate"), ("tandem generate --logit", "--logit-bias")],
    )
    def test_shell_completes_commands_and_their_options(
        self, tandem, monkeypatch, words, completed
    ):
        """
        The shell is told the names of commands, and the options of a command that is not loaded.
        """
        monkeypatch.setenv("_TANDEM_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        assert completed in tandem().communicate()[0].split()
