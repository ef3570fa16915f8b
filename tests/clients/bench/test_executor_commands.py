"""The executor's benchmarks: what they print and refuse, not how long anything takes."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from tandem.errors import InvalidConfig
from tandem_bench.__main__ import COMMANDS
from tandem_bench.__main__ import main as bench_main
from tandem_bench.device import ceilings
from tandem_bench.device.options import Where
from tandem_bench.device.timing import CudaTimer, num_copies
from tandem_bench.kernels import command as kernels
from tandem_bench.kernels.sampling_cases import KINDS
from tandem_bench.model import decode_steps, roofline
from tandem_client.cli import programs
from tandem_client.cli.app import app

ON_CPU = [
    *("--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--cpu-extension", "off"),
]
QUICK = [*ON_CPU, "--seconds", "0.001"]

FLAGS = {
    "kernels": [
        *("--operation", "patch", "--operation", "rows", "--model", "tiny", "--seconds", "0.001"),
        *("--block-size", "8", "--no-peers", "--full"),
    ],
    "model": [
        *(
            "--model",
            "tiny",
            "--batch",
            "2",
            "--batch",
            "3",
            "--context",
            "20",
            "--block-size",
            "8",
        ),
        *("--seconds", "0.001", "--full", "--batch-invariant", "--eager"),
    ],
    "roofline": [
        *("--model", "tiny", "--batch", "7", "--context", "20", "--full"),
        *("--tb-per-s", "1", "--tflop-per-s", "1"),
    ],
}
ANSWERS = {
    "kernels": ("shape", "T=512 heads=4/2x32"),
    "model": ("rows", 3),
    "roofline": ("rows", 7),
}
"""Flags of every kind and something that only they bring about, by command."""


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    """
    Shrink copies and products to sizes that take no time, with time enough for them anywhere.
    """
    monkeypatch.setitem(ceilings._COPY_BYTES, "cpu", 1 << 16)
    monkeypatch.setitem(ceilings._SQUARE, "cpu", 32)
    monkeypatch.setattr("tandem_bench.device.timing.CpuTimer.cold_bytes", 1)
    for benchmark in (kernels, decode_steps):
        monkeypatch.setattr(benchmark, "TIME_LIMIT_S", 3600.0)


class TestRoofline:
    def test_json_is_the_ceilings_and_the_floors(self, capsys):
        """
        --json prints one list: the two ceilings, then a step's floor per model, context and batch.
        """
        given = ["--tb-per-s", "4.3", "--tflop-per-s", "788", "--model", "llama-1b"]
        assert 0 == roofline.main([*ON_CPU, "--dtype", "bfloat16", *given, "--json"])
        ceilings, *rows = json.loads(capsys.readouterr().out)
        assert {"bytes_per_s": 4300000000000, "flop_per_s": 788000000000000} == ceilings
        expected = [(context, rows) for context in (1024, 4096) for rows in (1, 32, 128, 256)]
        assert expected == [(row["context"], row["rows"]) for row in rows]
        assert 1717 == pytest.approx(rows[0]["tokens_per_s"], abs=1)  # the table has whole numbers

    def test_ceilings_that_are_not_given_are_measured(self, capsys):
        """
        Without flags for them a copy and a matrix product say what the machine does.
        """
        assert 0 == roofline.main([*ON_CPU, "--model", "tiny", "--batch", "1", "--json"])
        ceilings, *_ = json.loads(capsys.readouterr().out)
        assert min(ceilings.values()) > 0

    def test_table_tells_ceilings_and_floors(self, capsys):
        """
        Without --json two lines tell the ceilings, and a row each point.
        """
        given = ["--tb-per-s", "4.3", "--tflop-per-s", "788"]
        assert 0 == roofline.main([*ON_CPU, *given, "--model", "tiny", "--batch", "3"])
        lines = capsys.readouterr().out.splitlines()
        assert "4300.0 GB/s" in lines[1]
        assert "788.000 TFLOP/s" in lines[2]
        assert [["tiny", "1024", "3"], ["tiny", "4096", "3"]] == [
            line.split()[:3] for line in lines[4:]
        ]


class TestKernels:
    def test_every_operation_is_measured_with_its_peers(self, capsys):
        """
        --json prints the ceilings and each operation at each shape, with what torch takes for dense keys.
        """
        assert 0 == kernels.main([*QUICK, "--model", "tiny", "--json"])
        rows = json.loads(capsys.readouterr().out)
        assert ["copy", "matmul"] == [row["operation"] for row in rows[:2]]
        found = {row["operation"] for row in rows[2:]}
        sampling = {f"sampling_{kind.operation}" for kind in KINDS}
        by_row = {"rms_norm", "add_rms_norm", "silu_mul", "rope_kv_write", "patch_rows"}
        assert {"decode", "prefill"} | sampling | by_row == found
        peers = {row["operation"] for row in rows if row["implementation"] == "torch-sdpa-dense"}
        assert {"decode", "prefill"} == peers
        for row in rows[2:]:
            assert row["time_us"] > 0, row
            assert 0 < row["percent_of_ceiling"], row

    def test_table_has_a_row_per_measurement(self, capsys):
        """
        Without --json a heading and a row per measurement are printed as they come, with a dash for what there is not.
        """
        given = ["--model", "tiny", "--operation", "patch", "--no-peers"]
        assert 0 == kernels.main([*QUICK, *given])
        rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
        assert ["copy", "matmul", "patch_rows", "patch_rows"] == [row[0] for row in rows]
        assert ["-", "-", "100.0"] == [rows[0][3], *rows[0][-2:]]

    def test_time_that_runs_out_is_told(self, capsys, monkeypatch):
        """
        Measurements for which there is no time are counted on stderr, and no others are lost.
        """
        monkeypatch.setattr(kernels, "TIME_LIMIT_S", 0.0)
        given = ["--model", "tiny", "--operation", "patch", "--json"]
        assert 0 == kernels.main([*QUICK, *given])
        printed = capsys.readouterr()
        assert "2 measurements left out, the machine is slow" in printed.err
        assert 2 == len(json.loads(printed.out))

    @pytest.mark.slow
    def test_failure_of_one_case_is_told_and_the_others_go_on(self, capsys, monkeypatch):
        """
        An operation that fails is named with its error, the exit code is 1, and the rest is measured.
        """

        def fail(*_args: object, **_kwargs: object) -> None:
            raise RuntimeError("no such kernel\nand more")

        monkeypatch.setattr("tandem_bench.kernels.row_cases.silu_mul", fail)
        given = ["--model", "tiny", "--operation", "rows", "--json"]
        assert 1 == kernels.main([*QUICK, *given])
        printed = capsys.readouterr()
        assert "bench kernels: silu_mul T=1 N=320 tandem: no such kernel\n" in printed.err
        found = {row["operation"] for row in json.loads(printed.out)}
        assert {"copy", "matmul", "rms_norm", "add_rms_norm", "rope_kv_write"} == found

    def test_buffers_of_every_point_fit_a_device(self):
        """
        No decode among the points of a GPU holds more than half of 80 GB: its sets of buffers, or the one set while a peer copies it.
        """
        where = Where(device=torch.device("cuda"), dtype=torch.bfloat16, num_threads=1)
        grid = kernels.GRIDS["cuda", True]
        timer = CudaTimer(where.device)
        found = list(kernels.cases(grid, ["decode"], where, block_size=16, with_peers=False))
        held = [num_copies(timer, case.num_bytes) * case.num_bytes for case in found]
        assert max(held) <= timer.cold_bytes + max(case.num_bytes for case in found)
        assert 2 * max(held) <= 40e9
        assert {"1", "256"} <= {
            case.shape.split()[0].removeprefix("B=") for case in found if "ctx=16384" in case.shape
        }

    def test_unknown_operation_is_refused(self):
        """
        An operation that there is not is a typed error naming those there are.
        """
        with pytest.raises(InvalidConfig, match="no operation is called 'attention'"):
            kernels.main([*QUICK, "--operation", "attention"])


class TestModel:
    @pytest.mark.slow
    def test_json_has_a_row_per_point(self, capsys):
        """
        --json prints time, rate and percentage of the floor of each batch and context.
        """
        given = ["--model", "tiny", "--batch", "1", "3", "--context", "20", "--json"]
        assert 0 == decode_steps.main([*QUICK, *given])
        rows = json.loads(capsys.readouterr().out)
        assert [("tiny", 1, 20), ("tiny", 3, 20)] == [
            (row["model"], row["rows"], row["context"]) for row in rows
        ]
        for row in rows:
            assert min(row["step_ms"], row["forward_ms"], row["sample_ms"]) > 0
            assert 0 < row["percent_of_floor"]

    @pytest.mark.slow
    def test_steps_are_measured_without_a_graph_as_well(self, capsys):
        """
        Rows of the batches that are named have the time of an eager step, and by how much it is longer.
        """
        given = ["--model", "tiny", "--batch", "1", "2", "--context", "20", "--json"]
        assert 0 == decode_steps.main([*QUICK, *given, "--beside-eager", "2"])
        one, two = json.loads(capsys.readouterr().out)
        assert "eager_step_ms" not in one
        # Five digits of each.
        assert two["times_eager"] == pytest.approx(two["eager_step_ms"] / two["step_ms"], rel=1e-3)

    @pytest.mark.slow
    def test_time_that_preparations_take_is_not_counted(self, capsys, monkeypatch):
        """
        A device is measured even if its library is compiled first, for however long.
        """
        now_s = [0.0]
        prepare = decode_steps.place

        def compile_first(given):
            now_s[0] += 1000.0
            return prepare(given)

        monkeypatch.setattr(decode_steps, "place", compile_first)
        monkeypatch.setattr(decode_steps, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
        given = ["--model", "tiny", "--batch", "1", "--context", "20", "--json"]
        assert 0 == decode_steps.main([*QUICK, *given])
        assert 1 == len(json.loads(capsys.readouterr().out))

    @pytest.mark.slow
    def test_cache_that_does_not_fit_is_told(self, capsys, monkeypatch):
        """
        A point with a cache larger than the memory is named on stderr and left out.
        """
        monkeypatch.setattr(
            "executor_svc.memory.kv_memory.available_bytes", lambda _device: 1 << 20
        )
        given = ["--model", "tiny", "--batch", "1", "64", "--context", "20", "--json"]
        assert 0 == decode_steps.main([*QUICK, *given])
        printed = capsys.readouterr()
        assert "tiny with 64 rows of 20 does not fit" in printed.err
        assert [1] == [row["rows"] for row in json.loads(printed.out)]

    def test_model_that_does_not_fit_is_told(self, capsys, monkeypatch):
        """
        Weights larger than the memory are named on stderr, and with nothing measured the exit code is 1.
        """
        monkeypatch.setattr("tandem_bench.model.random_model.available_bytes", lambda _: 1 << 20)
        given = ["--model", "llama-8b", "--batch", "1", "--context", "20", "--json"]
        assert 1 == decode_steps.main([*QUICK, *given])
        printed = capsys.readouterr()
        assert "llama-8b left out: weights of 29.9 GiB do not fit into the 0.0 GiB" in printed.err
        assert [] == json.loads(printed.out)


class TestCommandLine:
    def test_benchmark_that_there_is_not_is_a_usage_error(self, monkeypatch, capsys):
        """
        Without the name of a benchmark, the names are told and the exit code is 2.
        """
        monkeypatch.setattr(sys, "argv", ["bench", "kernel"])
        assert 2 == bench_main()
        told = capsys.readouterr().err
        assert told.startswith("bench: there is no benchmark 'kernel'\n")
        assert all(f"\n  {name} " in told for name in COMMANDS)

    def test_help_names_every_benchmark(self, capsys):
        """
        `--help` lists each benchmark with a sentence about it.
        """
        assert 0 == bench_main(["--help"])
        told = capsys.readouterr().out.splitlines()
        assert list(COMMANDS) == [line.split()[0] for line in told if line.startswith("  ")]

    def test_missing_device_is_one_readable_line(self, monkeypatch, capsys):
        """
        A device that the machine does not have ends with its reason and what to do, exit code 2.
        """
        monkeypatch.setattr(sys, "argv", ["bench", "roofline", "--device", "cuda:77"])
        assert 2 == bench_main()
        assert capsys.readouterr().err.startswith("INVALID_CONFIG: device 'cuda:77'")

    @pytest.mark.parametrize("name", FLAGS)
    def test_commands_flags_are_the_benchmarks(self, name, monkeypatch, capsys):
        """
        `tandem bench kernels`, `model` and `roofline` pass on all their flags, as the benchmark takes them.
        """
        asked = []
        monkeypatch.setattr(programs, "run_program", lambda *_, arguments: asked.append(arguments))
        result = CliRunner().invoke(app, ["bench", name, *FLAGS[name], *ON_CPU, "--json"])
        assert 0 == result.exit_code, result.output
        (flags,) = asked
        monkeypatch.setattr(sys, "argv", ["bench", *flags])
        assert 0 == bench_main()
        (row,) = [
            row for row in json.loads(capsys.readouterr().out) if ANSWERS[name] in row.items()
        ]
        assert row

    @pytest.mark.slow
    def test_interrupted_benchmark_ends_without_a_word(self):
        """
        Ctrl-C ends a benchmark with 130 and prints no traceback.
        """
        command = [sys.executable, "-m", "tandem_bench", "kernels", *ON_CPU, "--full"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.readline()  # it measures
            process.send_signal(2)
            errors = process.stderr.read()
            assert 130 == process.wait(60)
        assert "Traceback" not in errors
