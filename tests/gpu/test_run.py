"""The script for GPUs, as far as a CPU can try it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
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
from tests.gpu.plan import (
    BUDGET_S,
    STAGES,
    WITHOUT_A_DEVICE,
    Group,
    groups_on_cpu,
    groups_on_gpu,
)
from tests.gpu.rates import idle, offline, recovery, serve, tokens
from tests.gpu.rates.sweep import __main__ as sweep
from tests.gpu.rates.trace import __main__ as trace
from tests.gpu.results import Results, write_results
from tests.waiting import wait_until

PARSERS = {"kernels": kernels._parser, "model": decode_steps._parser, "roofline": roofline._parser}


def run(*arguments: str, left_s: float = 100.0, **limits: float) -> Outcome:
    part = Part(name="part", arguments=arguments, **{"limit_s": 90.0, **limits})
    outcomes: list[Outcome] = []
    run_parts([part], left_s=left_s, environment=dict(os.environ), tell=outcomes.append)
    (outcome,) = outcomes
    return outcome


def python(name: str, code: str) -> Part:
    return Part(name=name, arguments=("-c", code), limit_s=90.0, least_s=0.0)


def parts_of(groups) -> list[Part]:
    return [part for group in groups for part in group.parts]


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

    def test_benchmark_of_a_kernel_that_crashes_fails_with_its_rows(self):
        """
        A benchmark of the plan that ends with 1 has failed, and what it measured before still counts.
        """
        code = "import sys; print('[{\"x\": 1}]'); sys.exit(1)"
        for part in parts_of([*groups_on_gpu(Path()), *groups_on_cpu(Path())]):
            if "kernels" in part.arguments:
                crashing = replace(part, arguments=("-c", code), least_s=0.0)
                found: list[Outcome] = []
                run_parts([crashing], left_s=90, environment=dict(os.environ), tell=found.append)
                assert [("failed", [{"x": 1}])] == [(each.status, each.rows) for each in found]

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
    @pytest.mark.parametrize("make", [groups_on_gpu, groups_on_cpu])
    def test_benchmarks_take_the_flags_they_are_given(self, make):
        """
        Every flag of every benchmark among the parts exists.
        """
        parts = [part for part in parts_of(make(Path())) if "tandem_bench" in part.arguments]
        names = {part.arguments[2] for part in parts}
        assert set(PARSERS) == names
        for part in parts:
            PARSERS[part.arguments[2]]().parse_args(part.arguments[3:])

    @pytest.mark.parametrize("make", [groups_on_gpu, groups_on_cpu])
    def test_scripts_take_the_flags_they_are_given(self, make):
        """
        Every flag of every script of this folder among the parts exists.
        """
        parsers = {
            f"tests.gpu.rates.{name}": module._parser
            for name, module in {
                "idle": idle,
                "offline": offline,
                "recovery": recovery,
                "serve": serve,
                "sweep": sweep,
                "tokens": tokens,
                "trace": trace,
            }.items()
        }
        parts = [part for part in parts_of(make(Path())) if part.arguments[1] in parsers]
        assert set(parsers) == {part.arguments[1] for part in parts}
        for part in parts:
            parsers[part.arguments[1]]().parse_args(part.arguments[2:])

    @pytest.mark.parametrize("stage", STAGES)
    def test_stage_fits_one_command(self, monkeypatch, stage):
        """
        All parts of a stage have time within one command, even where each takes all of its own, and what is prepared too.
        """
        monkeypatch.setattr(script, "_is_there", lambda _: True)
        groups = [group for group in groups_on_gpu(Path()) if group.stage == stage]
        prepared_s = max((part.limit_s for part in script._preparing(groups, Path())), default=0)
        beside_s = sum(group.limit_s for group in groups if not group.is_timed)
        needed_s = sum(group.limit_s for group in groups) + max(0, prepared_s - beside_s)
        assert 0 < needed_s <= BUDGET_S <= 9.5 * 60 - 20

    def test_every_part_belongs_to_a_stage(self):
        """
        The stages together have every part, and no two parts have one name.
        """
        for make in (groups_on_gpu, groups_on_cpu):
            groups = make(Path())
            assert {group.stage for group in groups} <= set(STAGES)
            names = [part.name for part in parts_of(groups)]
            assert len(names) == len(set(names))

    def test_what_matters_most_fits_the_first_command(self):
        """
        Without a stage correctness comes first, and what the aims need most has time even where each part takes all of its own.
        """
        groups = groups_on_gpu(Path())
        first, last_tests = groups[0], groups[-2]
        assert {"tests/gpu"} == {str(Path(part.name).parent) for part in first.parts}
        assert all(part.name.startswith("tests/kernels/triton/") for part in last_tests.parts)
        in_turn = parts_of(groups[1:])
        names = [part.name for part in in_turn]
        needed = in_turn[: names.index("offline") + 1]
        assert first.limit_s + sum(part.limit_s for part in needed) <= BUDGET_S
        assert {"tokens", "decode attention", "decode steps of llama-8b"} <= {
            part.name for part in needed
        }

    def test_only_what_is_needed_is_prepared(self, monkeypatch):
        """
        Weights are drawn for parts that load them, and FlashInfer compiles for attention, if it is there.
        """
        monkeypatch.setattr(script, "_is_there", lambda _: True)
        prepared = {
            stage: [
                part.name
                for part in script._preparing(
                    [group for group in groups_on_gpu(Path()) if group.stage == stage], Path()
                )
            ]
            for stage in STAGES
        }
        assert {
            "kernels": ["flashinfer"],
            "serving": ["weights"],
            "rest": [],
            "tuning": [],
        } == prepared

    def test_nothing_is_prepared_beside_what_is_timed(self, monkeypatch, tmp_path):
        """
        Tests run beside preparations, of which all are over before the first part that is timed.
        """
        code = "import pathlib, time; time.sleep({}); pathlib.Path({!r}).touch(); print('[]')"
        done = tmp_path / "prepared"
        checks = f"import pathlib; assert pathlib.Path({str(done)!r}).exists(); print('[]')"
        preparing = Part(
            name="weights", arguments=("-c", code.format(1, str(done))), limit_s=90, read=read_rows
        )
        groups = [
            Group(
                stage="kernels", parts=[python("beside", "print('[]')")], limit_s=90, is_timed=False
            ),
            Group(stage="kernels", parts=[python("timed", checks)], limit_s=90),
        ]
        monkeypatch.setattr(script, "_preparing", lambda *_: [preparing])
        monkeypatch.setattr(script, "_environment", lambda _: dict(os.environ))
        outcomes: list[Outcome] = []
        given = SimpleNamespace(budget_s=200.0, device="cuda", part=[])
        script._run_groups(given, groups, tmp_path, SimpleNamespace(add=outcomes.append))
        assert [(name, "passed") for name in ("beside", "weights", "timed")] == [
            (outcome.name, outcome.status) for outcome in outcomes
        ]

    def test_preparation_that_takes_too_long_is_ended_before_what_is_timed(
        self, monkeypatch, tmp_path
    ):
        """
        A preparation that uses up its limit is told as such, and the timed part still runs.
        """
        hangs = Part(name="weights", arguments=("-c", "import time; time.sleep(600)"), limit_s=0.1)
        groups = [Group(stage="kernels", parts=[python("timed", "print('[]')")], limit_s=90)]
        monkeypatch.setattr(script, "_preparing", lambda *_: [hangs])
        monkeypatch.setattr(script, "_environment", lambda _: dict(os.environ))
        outcomes: list[Outcome] = []
        given = SimpleNamespace(budget_s=200.0, device="cuda", part=[])
        script._run_groups(given, groups, tmp_path, SimpleNamespace(add=outcomes.append))
        assert [("weights", "timed out"), ("timed", "passed")] == [
            (outcome.name, outcome.status) for outcome in outcomes
        ]

    def test_every_file_of_tests_for_a_device_is_a_part(self):
        """
        Each file with tests that take a device runs in a process of its own, in both folders and below.
        """
        takes_device = re.compile(r"def test_\w+\([^)]*\bdevice\b")
        parts = [part.name for part in parts_of(groups_on_gpu(Path()))]
        for folder in ("tests/gpu", "tests/kernels/triton"):
            files = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("test_*.py")}
            left_out = {file for file in files if any(map(file.match, WITHOUT_A_DEVICE))}
            assert {str(file) for file in files - left_out} == {
                name for name in parts if name.startswith(f"{folder}/")
            }
            for file in left_out:
                assert not takes_device.search((ROOT / file).read_text()), file


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

    def test_part_of_another_stage_is_refused(self, capsys):
        """
        A part that the stage does not have ends with the names of those it has.
        """
        given = ["--device", "cpu", "--tiny", "--stage", "serving", "--part", "roofline"]
        assert 2 == main(given)
        assert "there are: tokens, offline" in capsys.readouterr().out

    def test_results_of_other_sizes_are_not_added_to(self, tmp_path, capsys):
        """
        A tiny run does not mix its numbers with those of a GPU: it says so and leaves them alone.
        """
        write_results(tmp_path, Results(about={}, is_tiny=False, outcomes=[]))
        before = (tmp_path / "results.json").read_text()
        assert 2 == main(["--device", "cpu", "--tiny", "--results", str(tmp_path)])
        assert "results of full sizes" in capsys.readouterr().out
        assert before == (tmp_path / "results.json").read_text()

    def test_versions_and_machine_are_told(self):
        """
        The run tells device, processor and the versions of all that computes, and which of that is absent.
        """
        about = script._about(SimpleNamespace(device="cpu", commit="of-a-copy"))
        assert "of-a-copy" == about["commit"]
        assert torch.__version__ == about["torch"]
        assert {"triton", "transformers", "flashinfer-python", "processor"} <= set(about)
        assert "absent" == script._version("no-such-distribution")

    @pytest.mark.parametrize(
        ("capability", "name"), [((9, 0), "9.0a"), ((8, 0), "8.0"), ((10, 3), "10.3a")]
    )
    def test_flashinfer_compiles_for_the_device_that_is_there(self, monkeypatch, capability, name):
        """
        FlashInfer is told the architecture of the device, with its own instructions from 9.0 on.
        """
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        assert name == script._environment("cuda")["FLASHINFER_CUDA_ARCH_LIST"]
        assert "FLASHINFER_CUDA_ARCH_LIST" not in script._environment("cpu")

    @pytest.mark.slow
    def test_tiny_runs_on_a_cpu_add_to_one_page(self, tmp_path):
        """
        `tests/gpu/run --device cpu --tiny` runs parts, says which passed, and writes what it and an earlier command found.
        """
        own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for part in ("roofline", "decode steps"):
            command = [ROOT / "tests/gpu/run", "--device", "cpu", "--tiny", "--results", tmp_path]
            done = subprocess.run(
                [*command, "--stage", "kernels", "--part", part, "--budget-s", "300"],
                env=os.environ | own,  # the Python that runs this, where no environment was made
                capture_output=True,
                text=True,
                check=False,
            )
            assert 0 == done.returncode, done.stdout + done.stderr
            assert part in done.stdout
        page = (tmp_path / "results.md").read_text()
        assert "| tiny | 1024 | 32 |" in page
        assert "## Decode steps with and without a graph" in page
