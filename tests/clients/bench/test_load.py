"""Load tests: what is sent, and what is made of what was measured."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tandem.errors import InvalidParameter, QueueFull
from tandem.network.tls import server_credentials
from tandem.network.tls_files import ServerTls
from tandem_bench.load.command import app
from tandem_bench.load.report import percentiles, summarize
from tandem_bench.load.worker import Outcomes, Task
from tandem_bench.load.workload import Workload, read_prompts
from tests.certificates import Authority
from tests.clients.python.fake_server import ANSWER, Act, fake_server


def workload(**changes):
    """A small workload of random ids."""
    values = {"num_requests": 8, "input_len": 5, "output_len": 3, "vocab_size": 11, "seed": 1}
    return Workload(**values | {"temperature": 0.0} | changes)


class TestWorkload:
    def test_random_prompts_have_the_length_and_stay_in_the_vocabulary(self):
        """
        Each random prompt has input_len ids below vocab_size, and asks for output_len in any case.
        """
        asks = [workload().ask(index) for index in range(8)]

        assert [5] * 8 == [len(ask.options["token_ids"]) for ask in asks]
        assert all(0 <= token < 11 for ask in asks for token in ask.options["token_ids"])
        assert {(3, True)} == {(a.options["max_tokens"], a.options["ignore_eos"]) for a in asks}

    def test_requests_depend_on_seed_and_number_only(self):
        """
        The same seed gives the same requests, numbers and seeds differ.
        """
        assert workload().ask(3) == workload(num_requests=99).ask(3)
        assert workload().ask(3) != workload().ask(4)
        assert workload().ask(3) != workload(seed=2).ask(3)

    def test_file_of_prompts_is_used_in_turn(self, tmp_path):
        """
        Lines of a file are sent one after the other, again from the top when they are used up.
        """
        file = tmp_path / "prompts.jsonl"
        file.write_text('{"prompt": "a", "max_tokens": 9}\n\n{"token_ids": [1]}\n')
        asked = [workload(lines=read_prompts(file)).ask(index) for index in range(3)]

        assert ["a", None, "a"] == [ask.prompt for ask in asked]
        assert [9, 3, 9] == [ask.options["max_tokens"] for ask in asked]
        assert [1] == asked[1].options["token_ids"]

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            ("nonsense", ":1 is not valid JSON"),
            ('{"prompt": "a"}\n[1]', ":2 must be an object"),
            ('{"prompt": "a", "token_ids": [1]}', ":1 must be an object with exactly one of"),
            ('{"prompt": "a", "colour": 1}', ":1: unknown key 'colour'"),
            ("\n", "holds no prompt"),
        ],
    )
    def test_wrong_line_is_named(self, tmp_path, content, complaint):
        """
        A line that is no prompt is refused with file and line number.
        """
        file = tmp_path / "prompts.jsonl"
        file.write_text(content)

        with pytest.raises(InvalidParameter, match=complaint):
            read_prompts(file)

    def test_bytes_that_are_no_text_are_refused(self, tmp_path):
        """
        A file that is not UTF-8 is refused with its name.
        """
        file = tmp_path / "prompts.jsonl"
        file.write_bytes(b'{"prompt": "\xff"}\n')

        with pytest.raises(InvalidParameter, match="is not UTF-8"):
            read_prompts(file)

    def test_only_line_feeds_end_a_line(self, tmp_path):
        """
        Characters that Unicode counts as line breaks may stand in a prompt as they are.
        """
        file = tmp_path / "prompts.jsonl"
        file.write_text('{"prompt": "a\u2028b\x85"}\r\n{"prompt": "c"}\n', newline="")

        assert ({"prompt": "a\u2028b\x85"}, {"prompt": "c"}) == read_prompts(file)

    def test_task_survives_its_journey_to_a_process(self):
        """
        A task decoded from its JSON is the same task.
        """
        task = Task(
            address="a:1",
            workload=workload(lines=({"prompt": "a"},)),
            first=1,
            step=2,
            concurrency=3,
            num_warm_up=0,
            max_time_s=1.0,
            access={"ca": "ca.pem", "api_key": "sesame"},
        )

        assert task == Task.from_json(task.to_json())


class TestSummary:
    def test_throughput_spans_all_processes(self):
        """
        Tokens per second count from the earliest start to the latest token over all processes.
        """
        outcomes = [
            Outcomes(first_start_s=10.0, last_token_s=14.0, num_tokens=30, num_done=3),
            Outcomes(first_start_s=12.0, last_token_s=20.0, num_tokens=70, num_done=4),
        ]
        outcomes[1].errors = {"QUEUE_FULL": 2}
        summary = summarize(outcomes)

        assert 10.0 == summary["output_tokens_per_s"]
        assert (9, 2) == (summary["requests"], summary["errors"])

    def test_percentiles_are_interpolated(self):
        """
        p50, p90 and p99 of 0 to 100 are 50, 90 and 99; of nothing, None.
        """
        assert {"p50": 50.0, "p90": 90.0, "p99": 99.0} == percentiles(range(101))
        assert {"p50": None, "p90": None, "p99": None} == percentiles([])


class TestBenchServe:
    def test_address_that_is_a_url_is_a_usage_error(self):
        """
        An address that is no HOST:PORT ends with exit code 2 and one line that says so.
        """
        result = CliRunner().invoke(app, ["--address", "http://localhost:1"])

        assert (2, 1) == (result.exit_code, result.stderr.count("\n"))
        assert "give HOST:PORT, for example localhost:1, without http://" in result.stderr

    def test_json_has_exactly_the_agreed_keys(self, server):
        """
        --json prints one object with throughput, latencies, errors and requests, and nothing else.
        """
        result = CliRunner().invoke(
            app,
            [
                "--requests",
                "6",
                "--concurrency",
                "3",
                "--processes",
                "2",
                "--warm-up",
                "1",
                "--max-time-s",
                "600",
                "--json",
                "--input-len",
                "4",
                "--output-len",
                "5",
                "--address",
                server.address,
            ],
        )
        outcome = json.loads(result.stdout)

        assert {"output_tokens_per_s", "ttft_ms", "itl_ms", "e2e_ms", "errors", "requests"} == set(
            outcome
        )
        assert [{"p50", "p90", "p99"}] * 3 == [
            set(outcome[key]) for key in ("ttft_ms", "itl_ms", "e2e_ms")
        ]
        assert (6, 0) == (outcome["requests"], outcome["errors"])
        assert outcome["output_tokens_per_s"] > 0
        assert outcome["e2e_ms"]["p50"] >= outcome["ttft_ms"]["p50"] > 0
        sent = server.seen.generate
        assert 8 == len(sent)
        assert {4} == {len(request.token_ids.ids) for request in sent}
        assert {5, 8} == {request.stopping.max_tokens for request in sent}

    def test_batch_is_one_call_of_each_process(self, server):
        """
        With --batch the requests of a process, warm-up too, are items of one GenerateBatch call.
        """
        result = CliRunner().invoke(
            app,
            [
                *["--batch", "--json", "--requests", "6", "--concurrency", "4", "--processes", "2"],
                *["--warm-up", "1", "--max-time-s", "600", "--address", server.address],
            ],
        )
        outcome = json.loads(result.stdout)

        assert (6, 0) == (outcome["requests"], outcome["errors"])
        assert (2, 8) == (server.seen.num_batches, len(server.seen.generate))

    def test_every_failure_fails_the_command(self, server):
        """
        A run without a successful request counts the reasons on stderr and exits 1.
        """
        server.play(Act(accept=False, error=QueueFull("full", retry_after_s=0.0)))
        result = CliRunner().invoke(
            app,
            [
                "--requests",
                "3",
                "--concurrency",
                "2",
                "--warm-up",
                "0",
                "--max-time-s",
                "600",
                "--json",
                "--address",
                server.address,
            ],
        )

        assert 1 == result.exit_code
        assert 3 == json.loads(result.stdout)["errors"]
        assert "3 x QUEUE_FULL" in result.stderr

    def test_failing_warm_up_is_one_line(self, server):
        """
        A warm-up that fails ends the command with the server's reason.
        """
        server.play(Act(accept=False, error=QueueFull("full", retry_after_s=0.0)))
        result = CliRunner().invoke(
            app, [*["--requests", "3", "--json"], "--address", server.address]
        )

        assert 1 == result.exit_code
        assert "QUEUE_FULL: full" in result.stderr
        assert 1 == result.stderr.count("\n")

    def test_table_shows_latencies_and_throughput(self, server):
        """
        Without --json a table of latencies and a line of totals are printed.
        """
        result = CliRunner().invoke(
            app,
            [
                *["--requests", "2", "--warm-up", "0", "--max-time-s", "600"],
                *["--address", server.address],
            ],
        )

        assert 0 == result.exit_code
        assert "first token, ms" in result.stdout
        assert "2 requests, 0 errors" in result.stdout
        assert ANSWER not in result.stdout

    def test_every_process_calls_over_mutual_tls_with_the_key(self, tmp_path):
        """
        The command and each of its processes show the certificate and the key that it was given.
        """
        ca = Authority(tmp_path)
        pair, mine = ca.issue("server"), ca.issue("mine")
        files = ServerTls(certificate=pair.certificate, key=pair.key, client_ca=ca.file)
        given = [
            *("--ca", str(ca.file), "--cert", str(mine.certificate), "--key", str(mine.key)),
            *("--api-key", "sesame"),
        ]
        with fake_server(server_credentials(files)) as server:
            result = CliRunner().invoke(
                app,
                [
                    *(
                        "--requests",
                        "4",
                        "--concurrency",
                        "2",
                        "--processes",
                        "2",
                        "--warm-up",
                        "0",
                    ),
                    *("--max-time-s", "600", "--json", "--address", server.address, *given),
                ],
            )

        assert 0 == result.exit_code, result.output
        assert (4, 0) == tuple(json.loads(result.stdout)[key] for key in ("requests", "errors"))
        assert {"Bearer sesame"} == {seen.get("authorization") for seen in server.seen.metadata}
