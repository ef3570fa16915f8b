"""Commands against a fake server."""

from __future__ import annotations

import json
import os
import signal
import socket
from importlib import import_module
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from tandem.errors import Draining, InvalidModel, PromptTooLong, QueueFull
from tandem_client import Done, Finished, FinishReason, Timings, Usage
from tandem_client.cli.generation.generate import summary
from tests.clients.python.fake_server import ANSWER, CHOSEN_SEED, PATIENCE_S, Act

# Modules with names that their package gives to commands.
doctor = import_module("tandem_client.cli.doctor")
top = import_module("tandem_client.cli.top.command")


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
        assert 2000 == sent.time_limit_ms
        assert ["text"] == [
            field.name
            for field, _ in bare.ListFields()
            if field.name not in ("stopping", "idempotency_key")
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


class TestConfig:
    def test_file_environment_and_flags_are_shown_with_their_sources(
        self, run, tmp_path, monkeypatch
    ):
        """
        Every effective value is listed with where it came from.
        """
        file = tmp_path / "config.json"
        file.write_text('{"max_num_seqs": 9}')
        monkeypatch.setenv("TANDEM_MAX_BATCH_SIZE", "7")
        result = run("config", str(file), "--arg=--window=2", "--json")
        shown = {
            s["name"]: (s["value"], s["source"]) for s in json.loads(result.stdout)["settings"]
        }

        assert (9, "file") == shown["max_num_seqs"]
        assert (7, "environment") == shown["max_batch_size"]
        assert (2, "flag") == shown["window"]
        assert (16, "default") == shown["block_size"]

    def test_presets_are_named_and_shown(self, run):
        """
        The presets stand below the settings; with --preset their values are shown as its own.
        """
        result = run("config", "--preset", "low-latency")

        assert "presets: low-latency, high-throughput, memory-constrained, long-co" in result.stdout
        shown = json.loads(run("config", "show", "--preset=low-latency", "--json").stdout)
        assert {"name": "max_batch_size", "value": 8, "source": "preset"} in shown["settings"]
        assert 4096 == shown["presets"]["high-throughput"]["max_num_blocks"]

    def test_violated_rule_is_shown_in_its_exact_words(self, run, tmp_path):
        """
        A wrong value ends with exit code 2 and the rule's exact text.
        """
        file = tmp_path / "config.json"
        file.write_text('{"block_size": 0}')
        result = run("config", str(file))

        assert 2 == result.exit_code
        assert "tandem: INVALID_CONFIG: block_size must be greater than 0\n" == result.stderr

    def test_settings_of_a_running_server_come_from_it(self, run, server):
        """
        --live lists what the running server says.
        """
        result = run("config", "--live", server.address, "--json")

        assert {"name": "block_size", "value": 16, "source": "default"} in json.loads(
            result.stdout
        )["settings"]


class TestDoctor:
    @pytest.fixture(autouse=True)
    def quick_torch_probe(self, monkeypatch):
        """The probe imports torch, which takes seconds; TestTorchProbe runs the real one."""
        said = json.dumps({"version": "9", "cuda": "Fake GPU"})
        monkeypatch.setattr(doctor, "PROBE_TORCH", f"print({said!r})")
        monkeypatch.setattr(doctor, "TIMEOUT_S", PATIENCE_S)  # the server is this busy process

    def test_server_that_is_well_passes(self, run, server):
        """
        A healthy server is described, and the command exits 0.
        """
        address = ["--address", server.address, "--admin-address", server.address]
        result = run("doctor", "--json", "--server", *address)
        findings = {f["subject"]: f for f in json.loads(result.stdout)}

        assert 0 == result.exit_code
        assert "ok" == findings["server"]["verdict"]
        assert "FakeForCausalLM" in findings["server"]["fact"]
        assert "2 running" in findings["admin"]["fact"]

    @pytest.mark.parametrize("refusal", ["", "scheduler b has taken the executor over"])
    def test_unready_server_fails_with_advice(self, run, server, refusal):
        """
        A server that is up but not ready fails, with what it says itself or what to look at.
        """
        server.set_health("tandem.ready", False)
        server.seen.executor_refusal = refusal
        result = run("doctor", "--address", server.address, "--admin-address", server.address)

        assert 1 == result.exit_code
        assert f"is not ready; {refusal or 'its executor is missing'}" in result.stdout

    def test_server_of_a_model_it_cannot_serve_says_why(self, run, server):
        """
        A server with a broken chat template is not taken for one with a late executor.
        """
        server.set_health("tandem.ready", False)
        server.seen.model_error = InvalidModel("the chat template is invalid in line 1")
        result = run("doctor", "--address", server.address, "--admin-address", server.address)

        assert "is not ready; INVALID_MODEL: the chat template is invalid" in result.stdout

    def test_taken_port_is_a_warning(self, run):
        """
        A port that something else holds is warned about; without --server no server is needed.
        """
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = f"127.0.0.1:{other.getsockname()[1]}"
            result = run("doctor", "--json", "--address", "127.0.0.1:1", "--admin-address", taken)
        ports = {
            f["fact"]: f["verdict"] for f in json.loads(result.stdout) if f["subject"] == "port"
        }

        assert 0 == result.exit_code
        assert "warn" == ports[f"{taken} is taken"]

    def test_demanded_server_must_run(self, run):
        """
        With --server a missing server fails.
        """
        result = run("doctor", "--server", "--address", "127.0.0.1:1")

        assert 1 == result.exit_code


class TestTorchProbe:
    def test_torch_is_described(self):
        """
        The probe reports torch's version and device.
        """
        (finding,) = doctor.check_torch()

        assert ("ok", "torch") == (finding.verdict, finding.subject)
        assert finding.fact.startswith(version("torch").split("+")[0])


class TestUp:
    def test_wrong_limit_is_refused_before_anything_starts(self, run, tmp_path):
        """
        A limit that breaks a rule ends with the rule's exact text and exit code 2.
        """
        result = run("up", str(tmp_path), "--block-size", "0")

        assert 2 == result.exit_code
        assert "block_size must be greater than 0" in result.stderr

    def test_unknown_key_of_the_file_is_named(self, run, tmp_path):
        """
        A configuration file with an unknown key is refused with file and key.
        """
        file = tmp_path / "limits.json"
        file.write_text('{"blocks": 1}')
        result = run("up", str(tmp_path), "--config", str(file))

        assert 2 == result.exit_code
        assert f"{file}: blocks: unknown key 'blocks'" in result.stderr


class TestRoot:
    def test_version_is_printed(self, run):
        """
        --version prints the distribution's version.
        """
        assert "0.1.0\n" == run("--version").stdout

    def test_address_can_come_from_the_environment(self, run, server, monkeypatch):
        """
        TANDEM_CLIENT_ADDRESS stands for --address.
        """
        monkeypatch.setitem(os.environ, "TANDEM_CLIENT_ADDRESS", server.address)

        assert ANSWER + "\n" == run("generate", "hi").stdout
