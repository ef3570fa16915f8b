"""The script for GPUs, as far as a CPU can try it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from tandem_bench.kernels import command as kernels
from tandem_bench.model import decode_steps, roofline
from tests.gpu import __main__ as script
from tests.gpu.__main__ import main
from tests.gpu.parts import ROOT, Outcome, Part, count_tests, read_rows, run_parts
from tests.gpu.plan import BUDGET_S, WITHOUT_A_DEVICE, stages_on_cpu, stages_on_gpu
from tests.gpu.rates import idle, offline
from tests.gpu.rates.workload import Requests
from tests.gpu.results import aims, write_results
from tests.waiting import wait_until

PARSERS = {"kernels": kernels._parser, "model": decode_steps._parser, "roofline": roofline._parser}


def run(*arguments: str, left_s: float = 100.0, **limits: float) -> Outcome:
    part = Part(name="part", arguments=arguments, **{"limit_s": 90.0, **limits})
    outcomes: list[Outcome] = []
    run_parts([part], left_s=left_s, environment=dict(os.environ), tell=outcomes.append)
    (outcome,) = outcomes
    return outcome


def parts_of(stages) -> list[Part]:
    return [part for stage in stages for part in stage.parts]


class TestPart:
    def test_rows_are_what_a_process_prints(self):
        """
        A part that ends well passes with the JSON it printed.
        """
        outcome = run("-c", "print('[{\"x\": 1}]')")
        assert ("passed", [{"x": 1}]) == (outcome.status, outcome.rows)

    @pytest.mark.parametrize(
        ("code", "detail"),
        [
            ("import sys; print('[]'); sys.exit('no luck')", "exit code 1\nno luck"),
            ("print('oh')", "exit code 0; its output cannot be read: Expecting value"),
        ],
    )
    def test_process_that_fails_tells_why(self, code, detail):
        """
        An exit code, or output that is no JSON, makes a part fail, with the end of what it said.
        """
        outcome = run("-c", code)
        assert "failed" == outcome.status
        assert outcome.detail.startswith(detail)

    @pytest.mark.slow
    def test_part_that_takes_too_long_is_ended_with_all_it_started(self, tmp_path, monkeypatch):
        """
        A part that runs out of time is killed with its children, and what it printed still counts.
        """
        child = "import os, time; open('{}', 'w').write(str(os.getpid())); time.sleep(60)"
        pid_file = tmp_path / "pid"
        code = (
            "import subprocess, sys; print('[{\"x\": 1}]', flush=True); "
            f"subprocess.run([sys.executable, '-c', {child.format(pid_file)!r}])"
        )

        def late_once_it_runs() -> float:
            has_begun = pid_file.exists() and pid_file.read_text()
            return time.monotonic() + (1000.0 if has_begun else 0.0)

        clock = SimpleNamespace(monotonic=late_once_it_runs, sleep=time.sleep)
        monkeypatch.setattr("tests.gpu.parts.time", clock)
        outcome = run("-c", code)
        assert ("timed out", [{"x": 1}]) == (outcome.status, outcome.rows)
        with contextlib.suppress(psutil.NoSuchProcess):  # gone, or a zombie
            child = psutil.Process(int(pid_file.read_text()))
            wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE, "the child to end")

    def test_part_without_time_is_skipped_and_says_so(self):
        """
        With less of the budget left than a part needs, it is not started, and the numbers are told.
        """
        outcome = run("-c", "1/0", left_s=9e5, least_s=1e6)
        assert "skipped" == outcome.status
        assert re.fullmatch(r"(9|8)\d{5} s were left, it needs 1000000", outcome.detail)

    def test_parts_run_side_by_side_and_a_crash_costs_one_alone(self, tmp_path):
        """
        Two at a time can wait for each other; the one that is killed fails, and the other passes.
        """
        os.mkfifo(pipe := tmp_path / "pipe")
        reads = f"open({str(pipe)!r}).read(); print('[]')"
        crashes = f"import os; open({str(pipe)!r}, 'w').close(); os.kill(os.getpid(), 9)"
        parts = [
            Part(name=name, arguments=("-c", code), limit_s=90.0, least_s=0.0)
            for name, code in (("reads", reads), ("crashes", crashes))
        ]
        found: list[Outcome] = []
        run_parts(parts, left_s=100, environment=dict(os.environ), tell=found.append, at_once=2)
        assert {"reads": "passed", "crashes": "failed"} == {
            each.name: each.status for each in found
        }

    def test_rows_of_a_list_that_broke_off_are_read(self):
        """
        Every whole row that a killed benchmark printed counts.
        """
        assert [{"x": 1}, {"x": 2}] == read_rows('[{"x": 1},\n{"x": 2}]\n')
        assert [{"x": 1}] == read_rows('[{"x": 1},\n')
        assert [] == read_rows("[")
        with pytest.raises(ValueError, match="Expecting value"):
            read_rows("")

    def test_counts_of_tests_are_read(self):
        """
        Verdicts in pytest's lines are counted, and the names of failures are kept.
        """
        text = (
            "collected 4 items\n\ntests/a.py::one PASSED [ 25%]\ntests/a.py::two[a b] FAILED [ 50%]\n"
            "tests/a.py::three ERROR [ 75%]\ntests/a.py::four PASSED [100%]\n1 failed in 0.1s\n"
        )
        (found,) = count_tests(text)
        assert {"passed": 2, "failed": 1, "error": 1, "skipped": 0} == {
            name: found[name] for name in ("passed", "failed", "error", "skipped")
        }
        assert ["tests/a.py::two[a b]", "tests/a.py::three"] == found["failures"]
        assert [] == found["broke off in"]

    def test_test_that_never_ended_is_named(self):
        """
        The test that was running when pytest's lines broke off is told beside those that had ended.
        """
        (found,) = count_tests("collected 4 items\ntests/a.py::one PASSED\ntests/a.py::two[x] ")
        assert (1, ["tests/a.py::two[x]"]) == (found["passed"], found["broke off in"])

    def test_output_without_counts_is_no_result(self):
        """
        A part fails without rows when pytest did not get as far as its tests.
        """
        with pytest.raises(ValueError, match="no count of tests"):
            count_tests("ImportError: no module")
        with pytest.raises(ValueError, match="no count of tests"):
            count_tests("")


class TestPlan:
    @pytest.mark.parametrize("make", [stages_on_gpu, stages_on_cpu])
    def test_benchmarks_take_the_flags_they_are_given(self, make):
        """
        Every flag of every benchmark among the parts exists.
        """
        parts = [part for part in parts_of(make(Path())) if "tandem_bench" in part.arguments]
        names = {part.arguments[2] for part in parts}
        assert set(PARSERS) == names
        for part in parts:
            PARSERS[part.arguments[2]]().parse_args(part.arguments[3:])

    @pytest.mark.parametrize("make", [stages_on_gpu, stages_on_cpu])
    def test_scripts_take_the_flags_they_are_given(self, make):
        """
        Every flag of every script of this folder among the parts exists.
        """
        parsers = {"tests.gpu.rates.idle": idle._parser, "tests.gpu.rates.offline": offline._parser}
        parts = [part for part in parts_of(make(Path())) if part.arguments[1] in parsers]
        assert set(parsers) == {part.arguments[1] for part in parts}
        for part in parts:
            parsers[part.arguments[1]]().parse_args(part.arguments[2:])

    def test_parts_of_a_gpu_fit_nine_minutes(self):
        """
        Correctness comes first, and what the aims need has time even where each part takes all of its own.
        """
        first, benches, last = stages_on_gpu(Path())
        names = [part.name for part in benches.parts]
        needed = [part.limit_s for part in benches.parts[: names.index("offline") + 1]]
        assert first.limit_s + sum(needed) <= BUDGET_S <= 9 * 60 - 10
        assert {"tests/gpu"} == {str(Path(part.name).parent) for part in first.parts}
        assert {"tests/kernels/triton"} == {str(Path(part.name).parent) for part in last.parts}

    def test_every_file_of_tests_for_a_device_is_a_part(self):
        """
        Each file with tests that take a device runs in a process of its own, in both folders.
        """
        takes_device = re.compile(r"def test_\w+\([^)]*\bdevice\b")
        parts = [part.name for part in parts_of(stages_on_gpu(Path()))]
        for folder in ("tests/gpu", "tests/kernels/triton"):
            files = {path.relative_to(ROOT) for path in (ROOT / folder).glob("test_*.py")}
            left_out = {file for file in files if any(map(file.match, WITHOUT_A_DEVICE))}
            assert {str(file) for file in files - left_out} == {
                name for name in parts if str(Path(name).parent) == folder
            }
            for file in left_out:
                assert not takes_device.search((ROOT / file).read_text()), file


class TestAims:
    def test_medians_of_what_was_measured_are_judged(self):
        """
        Each aim takes the rows that belong to it, and the fastest of FlashInfer's ways.
        """

        def decode(shape, implementation, time_us, percent):
            of = {"operation": "decode", "shape": shape, "implementation": implementation}
            return {**of, "time_us": time_us, "percent_of_ceiling": percent, "tflop_per_s": 0.0}

        rows = {
            "decode attention": [
                decode("B=1 ctx=1024", "tandem", 10.0, 10.0),
                decode("B=1 ctx=1024", "flashinfer", 12.0, 9.0),
                decode("B=1 ctx=1024", "flashinfer-tensor-cores", 9.0, 12.0),
                decode("B=32 ctx=1024", "tandem", 10.0, 84.0),
                decode("B=64 ctx=1024", "tandem", 10.0, 88.0),
                decode("B=64 ctx=1024", "flashinfer", 13.0, 80.0),
            ],
            "prefill attention": [
                {
                    **decode("N=1 len=4096", "tandem", 1.0, 1.0),
                    "operation": "prefill",
                    "tflop_per_s": 399.0,
                },
            ],
            "decode steps of llama-8b": [
                {"model": "llama-8b", "rows": 32, "context": 1024, "percent_of_floor": 80.0},
                {"model": "llama-8b", "rows": 64, "context": 1024, "percent_of_floor": 90.0},
            ],
            "idle": [{"idle_percent": 2.0}],
            "offline": [
                {"engine": "tandem", "finished": True, "output_tokens_per_s": 30.0},
                {"engine": "transformers", "finished": False, "output_tokens_per_s": 10.0},
            ],
        }
        assert [
            (86.0, "reached"),
            ((0.9 + 1.3) / 2, "reached"),
            (80.0, "reached"),
            (None, "not measured"),
            (399.0, "missed"),
            (2.0, "reached"),
            (3.0, "reached"),
        ] == [
            (pytest.approx(aim.found) if aim.found else None, aim.verdict)
            for aim in aims(
                [
                    Outcome(name=name, status="passed", seconds=1.0, rows=found)
                    for name, found in rows.items()
                ]
            )
        ]

    def test_page_says_what_was_not_run(self, tmp_path):
        """
        The page has each part with what it found, and of those that did not pass the reason.
        """
        outcomes = [
            Outcome(name="idle", status="passed", seconds=1.0, rows=[{"idle_percent": 4.0}]),
            Outcome(name="offline", status="skipped", seconds=0.0, detail="3 s were left"),
        ]
        page = write_results(tmp_path, {"device": "none"}, outcomes, judges=True).read_text()
        assert "| idle | passed | 1.0 | 1 rows |" in page
        assert "through gRPC, % | at most 3 | 4 | missed |" in page
        assert "skipped:\n\n```\n3 s were left\n```" in page
        assert "===== offline: skipped" in (tmp_path / "log.txt").read_text()
        found = json.loads((tmp_path / "results.json").read_text())
        assert ["idle", "offline"] == [part["name"] for part in found["parts"]]


class TestWorkload:
    def test_is_the_one_that_others_publish(self):
        """
        Seed 0 with 256 requests of 100 to 1,024 tokens asks for 133,966 output tokens, as nano-vllm's does.
        """
        requests = Requests.draw(256, 100, 1024, vocab_size=128256)
        assert 133_966 == requests.num_output_tokens
        assert {True} == {100 <= len(prompt) <= 1024 for prompt in requests.prompts}


class TestScript:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    def test_without_a_gpu_it_says_so_and_fails(self, tmp_path, capsys):
        """
        A run without a CUDA device runs and writes nothing, and its exit code is not 0.
        """
        assert 3 == main(["--results", str(tmp_path / "results")])
        assert "no CUDA device was found" in capsys.readouterr().out
        assert not (tmp_path / "results").exists()

    def test_what_is_missing_or_too_old_is_named(self, monkeypatch):
        """
        Modules that are not there are named, and generated code that refuses the protobuf or gRPC it finds, with its reason.
        """

        def too_old(name):
            raise RuntimeError(f"{name} needs grpcio>=9\nand more")

        assert [] == script._missing(with_triton=False)
        monkeypatch.setattr(script, "NEEDED", ("json", "no_such_module", "no.such.package"))
        monkeypatch.setattr(script.importlib, "import_module", too_old)
        generated = script._GENERATED
        assert [
            "no_such_module",
            "no.such.package",
            f"{generated} ({generated} needs grpcio>=9)",
        ] == script._missing(with_triton=False)

    def test_unknown_part_is_refused(self, capsys):
        """
        A part that there is not ends with the names of those there are.
        """
        assert 2 == main(["--device", "cpu", "--tiny", "--part", "everything"])
        assert "decode steps" in capsys.readouterr().out

    @pytest.mark.slow
    def test_tiny_run_on_a_cpu_writes_its_page(self, tmp_path):
        """
        `tests/gpu/run --device cpu --tiny` runs parts, says which passed, and writes the results.
        """
        command = [ROOT / "tests/gpu/run", "--device", "cpu", "--tiny", "--results", tmp_path]
        done = subprocess.run(
            [*command, "--part", "roofline", "--budget-s", "200"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert 0 == done.returncode, done.stdout + done.stderr
        assert "roofline: passed" in done.stdout
        assert "| tiny | 1024 | 32 |" in (tmp_path / "results.md").read_text()

    @pytest.mark.slow
    def test_idle_share_is_measured_through_both_services(self, tmp_path, monkeypatch, capsys):
        """
        With a small model on the CPU the idle share of a run through scheduler and executor is a percentage.
        """
        part = next(part for part in parts_of(stages_on_cpu(tmp_path)) if part.name == "idle")
        monkeypatch.setattr(sys, "argv", ["idle", *part.arguments[2:]])
        assert 0 == idle.main()
        (row,) = json.loads(capsys.readouterr().out)
        assert 2 == row["rows"]
        assert row["steps"] >= 10
        assert 0 <= row["idle_percent"] < 100
        assert 0 < row["rows_per_step"] <= 2

    @pytest.mark.slow
    def test_offline_engines_answer_the_same_requests(self, tmp_path):
        """
        Tandem and transformers both make every token that was asked for, of one small model.
        """
        model = offline.write_model(tmp_path, tiny=True)
        requests = offline._requests(tiny=True)
        for serve in (offline._serve_tandem, offline._serve_transformers):
            num_tokens, seconds = serve(model, "cpu", requests)
            assert requests.num_output_tokens == num_tokens
            assert seconds > 0
