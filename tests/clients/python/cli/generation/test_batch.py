"""`tandem batch`: prompts of a file, into another file."""

from __future__ import annotations

import json

import pytest

from tandem.errors import Draining, NeverFits
from tests.clients.python.fake_server import ANSWER, PATIENCE_S, Act
from tests.waiting import wait_until


@pytest.fixture
def paths(tmp_path):
    """Files of the input and of the output."""
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestBatch:
    def test_each_request_has_a_line_in_the_order_of_the_input(self, run, server, paths):
        """
        A text, a prompt with options, a conversation and ids are completed; options of the command
        hold where a line has none, and the id of a line without one is its number.
        """
        source, target = paths
        asked = [
            "plain",
            {"id": "b", "prompt": "with options", "max_tokens": 3},
            {"id": "c", "messages": [{"role": "user", "content": "hello"}]},
            {"token_ids": [1, 2]},
        ]
        source.write_text("\n".join(map(json.dumps, asked)) + "\n\n")
        flags = ("--max-tokens", "9", "--logit-bias", "5=-1.5", "--concurrency", "1")
        result = run("batch", str(source), str(target), *flags, "--address", server.address)
        assert (0, "", "[4 done, 0 failed, 0 were there]\n") == (
            result.exit_code,
            result.stdout,
            result.stderr,
        )
        assert [1, "b", "c", 4] == [line["id"] for line in lines(target)]
        assert {ANSWER} == {line["result"]["text"] for line in lines(target)}
        assert [9, 3, 9, 9] == [one.stopping.max_tokens for one in server.seen.generate]
        assert [{5: -1.5}] * 4 == [dict(one.sampling.logit_bias) for one in server.seen.generate]

    def test_requests_that_are_there_are_not_sent_again(self, run, server, paths):
        """
        A second run sends only what the output lacks, and mends a line that was cut off.
        """
        source, target = paths
        source.write_text('"a"\n"b"\n"c"\n')
        target.write_text('{"id": 1, "result": {"text": "old"}}\n{"id": 2, "res')
        result = run("batch", str(source), str(target), "--address", server.address)
        assert "[2 done, 0 failed, 1 were there]\n" == result.stderr
        assert ["old", ANSWER, ANSWER] == [line["result"]["text"] for line in lines(target)]
        assert ["b", "c"] == sorted(one.text for one in server.seen.generate)
        again = run("batch", str(source), str(target), "--address", server.address)
        assert (0, 2) == (again.exit_code, len(server.seen.generate))

    def test_request_that_fails_has_its_error_and_the_others_go_on(self, run, server, paths):
        """
        Errors of requests stand in their places with reason and field; the exit code is 1. They are
        sent again only if that is asked for.
        """
        source, target = paths
        source.write_text('{"id": "a", "prompt": "x", "tempature": 1}\n"b"\n"c"\n')
        server.play(Act(accept=False, error=NeverFits("too big", field="prompt")), Act())
        command = ("batch", str(source), str(target), "--concurrency", "1")
        command += ("--address", server.address)
        result = run(*command)
        assert 1 == result.exit_code
        assert "2 of 3 requests failed: 1 INVALID_PARAMETER, 1 NEVER_FITS" in result.stderr
        misspelt, refused, done = lines(target)
        assert "Did you mean 'temperature'?" in misspelt["error"]["message"]
        assert ("NEVER_FITS", "INVALID_ARGUMENT", "prompt") == (
            refused["error"]["reason"],
            refused["error"]["code"],
            refused["error"]["field"],
        )
        assert ANSWER == done["result"]["text"]
        assert 0 == run(*command).exit_code
        assert 1 == run(*command, "--retry-errors").exit_code
        assert [3, "a", 2] == [line["id"] for line in lines(target)[2:]]
        assert ANSWER == lines(target)[-1]["result"]["text"]

    def test_server_that_cannot_serve_ends_the_batch(self, run, server, paths, monkeypatch):
        """
        An error that no request is to blame for is no line of the output: the batch ends with it,
        and goes on when it is run again.
        """
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        source, target = paths
        source.write_text('"a"\n"b"\n')
        server.play(Act(), Act(accept=False, error=Draining("bye", retry_after_s=0.0)))
        command = ("batch", str(source), str(target), "--concurrency", "1")
        result = run(*command, "--address", server.address)
        assert (3, [1]) == (result.exit_code, [line["id"] for line in lines(target)])
        assert "DRAINING: bye" in result.stderr
        server.play(Act())
        assert 0 == run(*command, "--address", server.address).exit_code
        assert [1, 2] == [line["id"] for line in lines(target)]

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ("{not json\n", "in.jsonl:1 is not JSON"),
            ('"a"\n[1, 2]\n', "in.jsonl:2 is neither a text nor an object"),
            ('{"id": "a", "prompt": ""}\n{"id": "a", "prompt": ""}\n', "in.jsonl:2 has the id 'a'"),
            ('{"id": [], "prompt": ""}\n', "in.jsonl:1 has an id that is no text or number"),
        ],
        ids=["json", "kind", "twice", "id"],
    )
    def test_wrong_input_is_refused_before_anything_is_sent(self, run, server, paths, text, line):
        """
        A line that is no request ends the command with its place.
        """
        source, target = paths
        source.write_text(text)
        result = run("batch", str(source), str(target), "--address", server.address)
        assert (2, []) == (result.exit_code, server.seen.generate)
        assert line in result.stderr
        assert not target.exists()

    def test_file_that_is_no_output_of_a_batch_is_left_alone(self, run, server, paths):
        """
        Another file in the place of the output is not written to.
        """
        source, target = paths
        source.write_text('"a"\n')
        target.write_text('{"other": 1}\n')
        result = run("batch", str(source), str(target), "--address", server.address)
        assert (2, '{"other": 1}\n') == (result.exit_code, target.read_text())

    def test_interruption_keeps_what_is_done(self, tandem, server, paths):
        """
        Ctrl-C ends the batch with what it has, and cancels what runs.
        """
        source, target = paths
        source.write_text('"a"\n"b"\n"c"\n')
        server.play(Act(), Act(num_tokens=2, hang=True))
        process = tandem(
            "batch", str(source), str(target), "--concurrency", "1", "--address", server.address
        )
        assert server.seen.hanging.wait(PATIENCE_S)
        wait_until(lambda: target.read_text().count("\n"), "the line of the first request")
        process.send_signal(2)
        assert 130 == process.wait(PATIENCE_S)
        assert server.seen.cancelled.wait(PATIENCE_S)
        assert [1] == [line["id"] for line in lines(target)]
