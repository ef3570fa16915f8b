"""`tandem generate` against a fake server."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace

import pytest

from tandem.errors import Draining, PromptTooLong, QueueFull
from tandem_client import Done, Finished, FinishReason, Timings, Usage
from tandem_client.cli.generation.output import summary
from tests.clients.python.fake_server import ANSWER, CHOSEN_SEED, PATIENCE_S, Act


class TestSummary:
    @pytest.mark.parametrize(
        ("num_tokens", "expected"),
        [
            (0, "5 prompt + 0 output tokens; ended by DEADLINE"),
            (1, "5 prompt + 1 output tokens, first after 200 ms; ended by DEADLINE"),
            (11, "5 prompt + 11 output tokens, first after 200 ms, then 20/s; ended by DEADLINE"),
        ],
    )
    def test_only_what_was_measured_is_said(self, num_tokens, expected):
        """
        Without a token there is no first one, and without a second one no speed.
        """
        usage = Usage(prompt_tokens=5, output_tokens=num_tokens, cached_tokens=0)
        timings = Timings(queue_s=0.0, time_to_first_token_s=0.2, total_s=0.7, preemptions=0)
        stream = SimpleNamespace(
            started=None,
            finished_choices={0: Finished(choice=0, reason=FinishReason.DEADLINE, matched=None)},
            done=Done(usage=usage, timings=timings),
        )

        assert expected == summary(stream)


class TestGenerate:
    def test_stdout_is_exactly_the_text(self, run, server):
        """
        Stdout holds the completion and a newline; everything about it goes to stderr.
        """
        result = run("generate", "hi", "--address", server.address)

        assert (0, ANSWER + "\n") == (result.exit_code, result.stdout)
        assert f"{len(ANSWER)} output tokens" in result.stderr

    def test_logprobs_are_a_table_with_one_header(self, run, server):
        """
        --logprobs prints a header, once, and a line for each token of the output, and no table of
        the prompt.
        """
        result = run("generate", "hi", "--logprobs", "1", "--address", server.address)
        header, *lines = result.stdout.splitlines()

        assert "   token   logprob   share  text          likeliest: token text logprob" == header
        assert [str(ord(character)) for character in ANSWER] == [line.split()[0] for line in lines]

    def test_json_is_one_object(self, run, server):
        """
        --json prints one object with text, reason, parameters and usage, and nothing else.
        """
        result = run("generate", "hi", "--json", "--address", server.address)
        outcome = json.loads(result.stdout)

        assert (ANSWER, "STOP_STRING", "!") == (
            outcome["text"],
            outcome["reason"],
            outcome["matched"],
        )
        assert CHOSEN_SEED == outcome["params"]["seed"]
        assert "" == result.stderr

    def test_options_reach_the_server(self, run, server):
        """
        Each option is sent as the field of its name; without options nothing is set.
        """
        flags = "--temperature 0 --top-p 0.5 --top-k 4 --seed 0 --max-tokens 7 --ignore-eos"
        stops = ["--stop", "a b", "--stop", "c", "--time-limit-s", "2"]
        run("generate", "hi", *flags.split(), *stops, "--address", server.address)
        run("generate", "hi", "--address", server.address)
        sent, bare = server.seen.generate

        assert (0.0, 0.5, 4, 0) == (
            sent.sampling.temperature,
            sent.sampling.top_p,
            sent.sampling.top_k,
            sent.sampling.seed,
        )
        assert (7, ["a b", "c"], True) == (
            sent.stopping.max_tokens,
            list(sent.stopping.stop),
            sent.stopping.ignore_eos,
        )
        assert 2.0 == sent.time_limit_s
        assert ["text"] == [
            field.name
            for field, _ in bare.ListFields()
            if field.name not in ("stopping", "attempt_key")
        ]

    def test_preset_reaches_the_server_under_given_options(self, run, server):
        """
        --preset sends what it sets, and an option beside it wins; an unknown one is a usage error.
        """
        at = ("--address", server.address)
        run("generate", "hi", "--preset", "chat", "--temperature", "0.5", *at)
        wrong = run("generate", "hi", "--preset", "poetry", *at)
        (sent,) = server.seen.generate

        assert (0.5, pytest.approx(0.9)) == (sent.sampling.temperature, sent.sampling.top_p)
        assert 2 == wrong.exit_code
        assert "Invalid value for '--preset'" in wrong.stderr

    @pytest.mark.parametrize(
        ("flags", "is_told"),
        [
            ("--temperature 0.5 --top-p 0.5", True),
            ("--temperature 0.5", False),
            ("--temperature 0.5 --top-p 1", False),
            ("--temperature 1 --top-p 0.5", False),
            ("--preset chat", False),
        ],
    )
    def test_both_temperature_and_top_p_are_served_with_a_hint(self, run, server, flags, is_told):
        """
        Each command is served; only one that changes temperature and top_p is told to change one.
        """
        for command in ("generate", "chat"):
            result = run(command, *flags.split(), "--address", server.address, stdin="hi")
            assert 0 == result.exit_code
            assert is_told is ("change one of them" in result.stderr)
        assert 2 == len(server.seen.generate)

    def test_prompt_comes_from_stdin_or_as_a_chat_turn(self, run, server):
        """
        "-" or no prompt reads stdin, a "-" after a prompt adds it; --chat sends it as a user's turn.
        """
        for arguments in (["-"], [], ["Explain:", "-"]):
            run("generate", *arguments, "--address", server.address, stdin="from stdin")
        run("generate", "hello", "--chat", "--address", server.address)
        *plain, chat = server.seen.generate

        assert ["from stdin", "from stdin", "Explain:\n\nfrom stdin"] == [one.text for one in plain]
        assert [("user", "hello")] == [(m.role, m.content) for m in chat.chat.messages]

    def test_prompt_without_quotation_marks_is_refused(self, run, server):
        """
        Several words as several arguments are refused before anything is sent.
        """
        result = run("generate", "tell", "me", "--address", server.address)

        assert (2, []) == (result.exit_code, server.seen.generate)
        assert "give one prompt, in quotation marks" in result.stderr

    @pytest.mark.parametrize(
        ("act", "code", "line"),
        [
            (
                Act(accept=False, error=PromptTooLong("it is\nlong")),
                4,
                "PROMPT_TOO_LONG: it is long",
            ),
            (Act(accept=False, error=QueueFull("full", retry_after_s=0.0)), 5, "QUEUE_FULL: full"),
            (Act(accept=False, error=Draining("bye", retry_after_s=0.0)), 3, "DRAINING: bye"),
        ],
        ids=["refused", "overloaded", "unavailable"],
    )
    def test_error_of_the_server_is_one_line_and_a_code(self, run, server, act, code, line):
        """
        Each kind of error has its exit code and one line with reason and sentence.
        """
        server.play(act)
        result = run("generate", "hi", "--address", server.address)

        assert code == result.exit_code
        assert f"tandem: {line}\n" == result.stderr

    def test_passed_deadline_has_its_own_code(self, run, server):
        """
        --deadline-s ends with exit code 6 and says so.
        """
        server.play(Act(hang=True))
        result = run("generate", "hi", "--deadline-s", "0.2", "--address", server.address)

        assert 6 == result.exit_code
        assert "deadline" in result.stderr

    @pytest.mark.slow
    def test_missing_server_is_named_with_advice(self, run):
        """
        Without a server the line names the address and how to start one.
        """
        result = run("generate", "hi", "--address", "127.0.0.1:1")

        assert 3 == result.exit_code
        assert "cannot reach 127.0.0.1:1: Connection refused" in result.stderr
        assert "tandem up" in result.stderr
        assert 1 == result.stderr.count("\n")

    def test_ctrl_c_cancels_the_request(self, tandem, server):
        """
        Ctrl-C in the middle of a stream ends the request on the server and exits 130 without a traceback.
        """
        server.play(Act(num_tokens=5, hang=True))
        process = tandem("generate", "hi", "--address", server.address)
        assert ANSWER[:5] == process.stdout.read(5)
        assert server.seen.hanging.wait(PATIENCE_S)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)

        assert (130, "") == (process.returncode, errors)
        assert server.seen.cancelled.wait(PATIENCE_S)

    def test_reader_that_leaves_ends_the_command_quietly(self, tandem, server):
        """
        A closed pipe (as with `| head`) ends the command without a traceback.
        """
        server.play(Act(answer=ANSWER * 5000, piece_lens=(1000,)))
        process = tandem("generate", "hi", "--address", server.address)
        process.stdout.read(5)
        process.stdout.close()

        assert 1 == process.wait(PATIENCE_S)
        assert "" == process.stderr.read()
