"""The parts that measure services and whole models, as far as a CPU can try them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tandem_bench.device.floors import Ceilings
from tandem_bench.offline.engines import transformers_batch
from tests.gpu.parts import read_rows
from tests.gpu.plan import groups_on_cpu
from tests.gpu.rates import idle, offline, recovery, serve, tokens
from tests.gpu.rates.device_memory import Look, first_with
from tests.gpu.rates.live_streams import LiveStream, LiveStreams, num_different, went_on_s
from tests.gpu.rates.tokens import Answer, compared
from tests.gpu.rates.workload import OfflineRequests


@pytest.fixture
def run_part(tmp_path, monkeypatch, capsys):
    """Return a function that runs a part's script with its arguments for a CPU and gives its rows."""

    def run(module):
        name = module.__name__.rpartition(".")[2]
        parts = [part for group in groups_on_cpu(tmp_path) for part in group.parts]
        (part,) = (part for part in parts if part.name == name)
        monkeypatch.setattr(sys, "argv", [name, *part.arguments[2:]])
        assert 0 == module.main()
        return json.loads(capsys.readouterr().out)

    return run


class TestWorkload:
    def test_is_the_one_that_others_publish(self):
        """
        Seed 0 with 256 requests of 100 to 1,024 tokens asks for 133,966 output tokens, as nano-vllm's does.
        """
        requests = OfflineRequests.draw(256, 100, 1024, vocab_size=128256)
        assert 133_966 == requests.num_output_tokens
        assert {True} == {100 <= len(prompt) <= 1024 for prompt in requests.prompts}


@pytest.mark.slow
class TestServices:
    def test_idle_share_is_measured_through_both_services(self, run_part):
        """
        With a small model on the CPU the idle share of a run through scheduler and executor is a percentage.
        """
        (row,) = run_part(idle)
        assert 2 == row["rows"]
        assert row["steps"] >= 10
        assert row["idle_percent"] < 100
        assert 0 < row["rows_per_step"] <= 2

    def test_clients_latencies_are_measured_by_requests_in_flight(self, run_part):
        """
        Each number in flight has a rate and latencies, over requests that were all answered.
        """
        rows = run_part(serve)
        assert [1, 2] == [row["in flight"] for row in rows]
        for row in rows:
            assert (row["asked"], 0) == (row["answered"], row["errors"])
            assert row["output_tokens_per_s"] > 0
            assert 0 < row["ttft_ms p50"] <= row["ttft_ms p99"]
            assert 0 <= row["itl_ms p50"] <= row["itl_ms p99"]

    def test_streams_go_on_after_each_kill_with_the_same_tokens(self, run_part):
        """
        Executors are killed under streams, which all go on at the next one, and their tokens are those of streams that nothing disturbed.
        """
        *kills, last = run_part(recovery)
        assert [1, 2] == [row["kill"] for row in kills]
        for row in kills:
            assert 0 < row["process_gone_s"] < row["next_listens_s"]
            assert 0 < row["first_goes_on_s"] <= row["all_go_on_s"]
            assert row["memory_back_s"] is None
        assert (0, 0) == (last["different"], last["failed"])
        assert last["compared_tokens"] >= 2 * 3 * 4


class TestServe:
    def test_load_without_an_answer_has_a_row_that_says_so(self, monkeypatch, tmp_path, capsys):
        """
        Loads in which no request succeeded are rows with 0 answers, and the part fails.
        """
        services = SimpleNamespace(address="127.0.0.1:1")
        monkeypatch.setattr(serve, "Services", lambda *_, **__: nullcontext(services))
        monkeypatch.setattr(serve, "write_model", lambda *_, **__: tmp_path)
        failed = SimpleNamespace(returncode=1, stdout="")
        monkeypatch.setattr(serve.subprocess, "run", lambda *_, **__: failed)
        monkeypatch.setattr(sys, "argv", ["serve", "--concurrency", "2", "4"])
        assert 1 == serve.main()
        rows = json.loads(capsys.readouterr().out)
        assert [(2, 8, 0), (4, 12, 0)] == [
            (row["in flight"], row["asked"], row["answered"]) for row in rows
        ]


class TestIdle:
    def test_share_is_the_clock_time_that_no_step_took(self):
        """
        Between two looks 100 steps of 64 rows took 9 of 10 seconds, so that the device was idle for a tenth.
        """
        before = idle.Totals(at_s=5.0, steps=10, tokens=700, busy_s=3.0)
        after = idle.Totals(at_s=15.0, steps=110, tokens=7100, busy_s=12.0)
        found = idle.between(before, after)
        assert (64, 100, 100.0) == (found["rows_per_step"], found["steps"], found["step_ms"])
        assert found["idle_percent"] == pytest.approx(10)

    def test_steps_that_overlap_show_as_less_than_no_idle_time(self):
        """
        Steps that took more time than the clock's are not told as a device that is never idle.
        """
        before = idle.Totals(at_s=0.0, steps=0, tokens=0, busy_s=0.0)
        after = idle.Totals(at_s=10.0, steps=1, tokens=1, busy_s=11.0)
        assert idle.between(before, after)["idle_percent"] == pytest.approx(-10)


class TestLiveStreams:
    def test_stream_goes_on_where_its_longest_pause_ends(self):
        """
        Tokens that were on their way at the kill come before the pause; what counts is the first one after it.
        """
        assert 8.0 == went_on_s([1.0, 2.0, 2.5, 10.0, 10.1, 11.0], since_s=2.0)
        assert 8.0 == went_on_s([1.0, 1.9, 10.0], since_s=2.0)

    def test_stream_without_tokens_after_a_kill_has_not_gone_on(self):
        """
        A stream that stopped at the kill has no time at which it went on.
        """
        assert went_on_s([1.0, 1.9], since_s=2.0) is None

    def test_streams_with_other_tokens_are_counted(self):
        """
        A stream may be left early; a token that is not the undisturbed one, or one too many, counts.
        """
        whole = [LiveStream(number, 9, tokens=[1, 2, 3]) for number in range(4)]
        found = [LiveStream(0, 9, tokens=each) for each in ([1, 2], [1, 5, 3], [1, 2, 3, 4], [])]
        assert 2 == num_different(found, whole)

    def test_stream_that_fails_keeps_its_error(self):
        """
        A stream of a server that is not there fails, and the rest is not waited for.
        """
        stream = LiveStream(0, 9)
        stream.read("127.0.0.1:1", threading.Event())
        assert stream.problem is not None
        streams = LiveStreams("127.0.0.1:1", [9, 9])
        assert 2 == sum(each.problem is not None for each in streams.finish())
        assert 2 == streams.num_failed
        with pytest.raises(SystemExit, match="over before the last kill"):
            streams.wait_for_more(1)


class TestDeviceMemory:
    def test_memory_is_back_at_the_first_look_with_as_much(self):
        """
        Looks before the kill do not count, nor those with less than is to come back.
        """
        looks = [Look(1.0, 90), Look(2.0, 40), Look(3.0, 60), Look(4.0, 88), Look(5.0, 90)]
        assert Look(4.0, 88) == first_with(looks, 85, since_s=2.5)
        assert first_with(looks, 95, since_s=2.5) is None


class TestOffline:
    @pytest.mark.slow
    def test_engines_answer_the_same_requests(self, tmp_path):
        """
        Tandem and transformers both make every token that was asked for, of one small model.
        """
        model = offline.write_model(tmp_path, tiny=True)
        requests = offline._requests(tiny=True)
        for serve_all in (offline._serve_tandem, offline._serve_transformers):
            num_tokens, seconds = serve_all(model, "cpu", requests)
            assert requests.num_output_tokens == num_tokens
            assert seconds > 0

    @pytest.mark.parametrize("name", ["block_size", "page_size"])
    def test_pages_of_transformers_are_set_by_the_name_that_it_has(self, name, monkeypatch):
        """
        Versions before and after its option was renamed get the tokens of a page.
        """
        config = make_dataclass("Config", [("num_blocks", int), (name, int)])
        monkeypatch.setattr(transformers_batch, "ContinuousBatchingConfig", config)
        assert {name: 256} == transformers_batch.page_size_option(256)

    def test_share_is_that_of_the_ceiling_of_the_same_run(self, monkeypatch, capsys):
        """
        Each engine's share is its rate over what the device's own rates allow; the ceiling has none.
        """
        rates = {"ceiling": 200.0, "tandem": 150.0, "transformers": 20.0}

        def answer(engine, _model, _given):
            return {"engine": engine, "finished": True, "output_tokens_per_s": rates[engine]}

        monkeypatch.setattr(offline, "_in_own_process", answer)
        monkeypatch.setattr(offline, "write_model", lambda *_, **__: Path())
        monkeypatch.setattr(sys, "argv", ["offline"])
        assert 0 == offline.main()
        ceiling, *engines = json.loads(capsys.readouterr().out)
        assert "share_of_ceiling" not in ceiling
        assert [0.75, 0.1] == [row["share_of_ceiling"] for row in engines]

    @pytest.mark.parametrize(("printed", "rate"), [(b"begun {}\n", 3.4), (None, None)])
    def test_late_engine_has_a_rate_only_since_its_timed_part_began(
        self, monkeypatch, capsys, printed, rate
    ):
        """
        Of an engine that is ended, all tokens over the time since it began to be timed are told, without a share; none if it did not begin.
        """
        monkeypatch.setattr(offline, "time", SimpleNamespace(monotonic=lambda: 110.0))
        num_tokens = offline._requests(tiny=True).num_output_tokens

        def run_out(command, **_options):
            if "ceiling" in command:
                told = json.dumps({"engine": "ceiling", "output_tokens_per_s": 9.0})
                return SimpleNamespace(returncode=0, stdout=told)
            began = printed and printed.replace(b"{}", str(110.0 - num_tokens / 3.4).encode())
            raise subprocess.TimeoutExpired(command, 60, output=began)

        monkeypatch.setattr(offline.subprocess, "run", run_out)
        monkeypatch.setattr(offline, "write_model", lambda *_, **__: Path())
        monkeypatch.setattr(sys, "argv", ["offline", "--tiny"])
        assert (0 if rate else 1) == offline.main()
        _, *engines = json.loads(capsys.readouterr().out)
        for row in engines:
            assert not row["finished"]
            assert "share_of_ceiling" not in row
            assert row["output_tokens_per_s"] == (rate and pytest.approx(rate))

    def test_engines_are_warmed_up_by_as_many_requests_of_a_few_tokens(self):
        """
        An engine meets the real number of requests before it is timed, with prompts of which no prefix comes again.
        """
        served = []

        def serve(asked):
            served.append(asked)
            return asked.num_output_tokens

        requests = OfflineRequests.draw(16, 20, 90, 1000)
        num_tokens, _ = offline._timed(serve, requests)
        warming, timed = served
        assert requests is timed
        assert requests.num_output_tokens == num_tokens
        assert 16 * 4 == warming.num_output_tokens
        pairs = list(zip(warming.prompts, requests.prompts, strict=True))
        assert all(len(one) == len(other) and one[0] != other[0] for one, other in pairs)

    @pytest.mark.slow
    def test_ceiling_follows_from_measured_rates(self, monkeypatch):
        """
        The ceiling's parts add up, and a device with twice the rates would need half of each.
        """
        given = offline._parser().parse_args(["--device", "cpu", "--tiny"])
        row = offline._ceiling(given)
        assert row["seconds"] == pytest.approx(row["prompts_s"] + row["weights_s"] + row["kv_s"])
        assert row["output_tokens_per_s"] == pytest.approx(
            offline._requests(tiny=True).num_output_tokens / row["seconds"]
        )
        double = Ceilings(bytes_per_s=2 * row["bytes_per_s"], flop_per_s=2 * row["flop_per_s"])
        assert 0 < row["bytes_per_s"]
        monkeypatch.setattr(offline, "measure_ceilings", lambda *_: double)
        faster = offline._ceiling(given)
        for part in ("prompts_s", "weights_s", "kv_s", "seconds"):
            assert row[part] == pytest.approx(2 * faster[part])


class TestTokens:
    def test_first_differences_are_counted_and_judged_by_their_margins(self):
        """
        A request counts up to its first difference, which is beyond rounding where the token was won by more.
        """
        expected = [Answer([1, 2, 3], [0.5, 0.001, 0.5]) for _ in range(3)]
        found = [Answer([1, 2, 3]), Answer([1, 9, 9]), Answer([1, 2, 7])]
        assert {
            "requests": 3,
            "tokens": 9,
            "equal_before": 3 + 1 + 2,
            "first_differences": 2,
            "beyond_margin": 1,
        } == compared(expected, found, eps=0.01)

    @pytest.mark.slow
    def test_captured_steps_give_the_tokens_of_eager_ones(self, run_part):
        """
        On the CPU chunks and captured steps give float32 tokens like those of whole prompts and eager steps, greedy and drawn.
        """
        rows = run_part(tokens)
        assert [(dtype, kind) for dtype in tokens.DTYPES for kind in ("greedy", "drawn")] == [
            (row["dtype"], row["tokens are"]) for row in rows
        ]
        assert {4 * 12} == {row["tokens"] for row in rows}
        assert [0, 0] == [row["beyond_margin"] for row in rows if row["dtype"] == "float32"]
        assert min(row["equal_before"] for row in rows) > 0

    def test_wrong_tokens_in_float32_fail_the_part(self, monkeypatch, capsys):
        """
        A float32 token that differs though it was won by more than rounding makes the part fail, with its rows.
        """

        def compare(dtype, _device, _requests):
            yield {"dtype": dtype, "beyond_margin": int(dtype == "float32")}

        monkeypatch.setattr(tokens, "compare", compare)
        monkeypatch.setattr(sys, "argv", ["tokens", "--device", "cpu", "--tiny"])
        assert 1 == tokens.main()
        assert 2 == len(json.loads(capsys.readouterr().out))

    def test_rows_of_float32_are_there_when_time_runs_out_later(self, monkeypatch, capsys):
        """
        The rows of float32 come first and at once, so that a part that is ended in bfloat16 has them.
        """

        def compare(dtype, _device, _requests):
            if dtype == "bfloat16":
                (row,) = read_rows(capsys.readouterr().out)
                assert "float32" == row["dtype"]
                raise TimeoutError
            yield {"dtype": dtype, "beyond_margin": 0}

        monkeypatch.setattr(tokens, "compare", compare)
        monkeypatch.setattr(sys, "argv", ["tokens", "--device", "cpu", "--tiny"])
        with pytest.raises(TimeoutError):
            tokens.main()

    def test_requests_are_half_greedy_and_fit(self):
        """
        Of 64 requests every other one is greedy, and none is longer than a runner holds.
        """
        requests = tokens.TokenRequests.of(tiny=False)
        assert 64 == len(requests.prompt_len)
        assert {0.0} == {each.temperature for each in requests.samplings[::2]}
        assert all(each.temperature > 0 for each in requests.samplings[1::2])
        assert max(requests.prompt_len) + requests.output_len <= requests.longest
        assert torch.float32 == tokens.DTYPES["float32"]
