"""The command: what it prints, compares and refuses."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys

import pytest

from tandem.errors import InternalError, SessionLost
from tandem.installation import install_command
from tandem_simulator.__main__ import main
from tandem_simulator.settings import known_names
from tests.clients.simulator.experiments import SMALL

FLAGS = [f"--{name.replace('_', '-')}={text}" for name, text in SMALL.items()]


class TestOutput:
    def test_text_names_every_number(self, capsys):
        """
        One simulation prints throughput, goodput, latencies, cache and memory; its own speed goes to
        stderr.
        """
        assert 0 == main([*FLAGS, "--check"])
        printed = capsys.readouterr()
        for word in (
            "60 sent, 60 finished", "output tokens/s", "goodput", "first token, ms",
            "next token, ms", "queue, ms", "request, ms", "p99", "from the cache", "computed again",
            "preemptions", "swapped", "rows",
        ):  # fmt: skip
            assert word in printed.out
        assert "requests/s" in printed.err
        assert "wall" not in printed.out

    def test_json_has_settings_and_results(self, capsys):
        """
        --json prints one object with what varied, every setting and every result, and nothing else.
        """
        assert 0 == main([*FLAGS, "--json"])
        printed = json.loads(capsys.readouterr().out)
        assert {"varied", "settings", "results"} == set(printed)
        assert {
            "duration_s", "requests", "throughput", "ttft_s", "inter_token_s", "tpot_s",
            "end_to_end_s", "queue_s", "tokens", "memory", "steps", "executors", "over_time",
        } == set(printed["results"])  # fmt: skip
        assert {"mean", "p50", "p90", "p99", "max"} == set(printed["results"]["ttft_s"])
        assert set(known_names()) == set(printed["settings"])
        assert "lognormal:80:0.8:400" == printed["settings"]["prompt_len"]

    @pytest.mark.slow
    def test_comparison_runs_every_combination(self, capsys):
        """
        --compare runs once per combination of values and prints a column for each.
        """
        axes = ["--compare", "schedule-policy=fcfs,lpm", "--compare=window=1,2"]
        assert 0 == main([*FLAGS, *axes, "--json"])
        runs = json.loads(capsys.readouterr().out)
        assert [
            {"schedule_policy": policy, "window": window}
            for policy in ("fcfs", "lpm")
            for window in ("1", "2")
        ] == [one["varied"] for one in runs]
        assert [1, 2, 1, 2] == [one["settings"]["window"] for one in runs]

        assert 0 == main([*FLAGS, *axes])
        lines = capsys.readouterr().out.splitlines()
        assert ["schedule_policy", "fcfs", "fcfs", "lpm", "lpm"] == lines[0].split()
        assert ["window", "1", "2", "1", "2"] == lines[1].split()
        assert {"TTFT p50, ms", "output tokens/s", "KV cache used, %"} <= {
            line[:20].strip() for line in lines
        }

    def test_several_executors_have_a_line_each(self, capsys):
        """
        With several executors the text ends with their steps, busy time and cache hits; with one it does not.
        """
        assert 0 == main([*FLAGS, "--executors=3"])
        lines = capsys.readouterr().out.splitlines()
        assert lines[-4].startswith("executor ")
        assert "busy time, max / mean:" in lines[-4]
        assert ["0", "1", "2"] == [line.split()[0] for line in lines[-3:]]
        assert "3 executors busy" in "".join(lines)
        assert 0 == main(FLAGS)
        assert "max / mean" not in capsys.readouterr().out

    def test_dp_size_is_another_name_of_executors(self, capsys):
        """
        --dp-size sets the number of executors, by itself and as the name of a comparison.
        """
        assert 0 == main([*FLAGS, "--dp-size=2", "--json"])
        assert 2 == json.loads(capsys.readouterr().out)["settings"]["executors"]
        assert 0 == main([*FLAGS, "--compare=dp-size=1,3", "--json"])
        runs = json.loads(capsys.readouterr().out)
        assert [1, 3] == [len(one["results"]["executors"]) for one in runs]
        assert [{"executors": "1"}, {"executors": "3"}] == [one["varied"] for one in runs]

    @pytest.mark.slow
    def test_comparison_stays_within_eighty_columns(self, capsys):
        """
        More runs than fit side by side are printed in parts, each with all its measures.
        """
        policies = "schedule-policy=fcfs,lpm,dfs-weight,lof,random"
        assert 0 == main([*FLAGS, "--compare", policies, "--compare=window=1,2,3,4"])
        parts = capsys.readouterr().out.split("\n\n")
        heads = [part.splitlines()[0].split() for part in parts]

        assert 20 == sum(len(head) - 1 for head in heads)
        assert {15} == {len(part.splitlines()) for part in parts}
        assert max(len(line) for part in parts for line in part.splitlines()) <= 80

    def test_comparison_without_a_difference_says_what_to_try(self, capsys):
        """
        A comparison of a workload that leaves nothing to decide says so on stderr and names
        another.
        """
        policies = ["--compare", "schedule-policy=fcfs,lpm"]
        assert 0 == main([*FLAGS, *policies, "--requests=5"])
        assert "--workload shared-prefix" in capsys.readouterr().err
        shared = ["--machine=h100-8b-tight", "--workload=shared-prefix", "--requests=60"]
        assert 0 == main([*shared, *policies])
        assert "all runs are alike" not in capsys.readouterr().err

    def test_runs_as_a_module(self):
        """
        `python -m tandem_simulator` is the command, and its help lists workloads, machines and
        the core's options.
        """
        command = [sys.executable, "-m", "tandem_simulator", "--help"]
        outcome = subprocess.run(command, capture_output=True, text=True, check=True)
        for word in ("--schedule-policy", "shared-prefix", "cpu-135m", "--compare", "--block-size"):
            assert word in outcome.stdout


class TestErrors:
    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            (["--requests=none"], "requests is 'none': it must be a whole number"),
            (["--requests=0"], "requests is 0: it must be 1 or more"),
            (["--request-rate=fast"], "request_rate is 'fast': it must be a number"),
            (["--workload=tail"], "workload is 'tail': it must be one of plain, shared-prefix"),
            (["--machine=tpu"], "machine is 'tpu': it must be one of"),
            (["--schedule-policy=best"], "schedule_policy is 'best': it must be one of fcfs, lpm"),
            (["--prompt-len=long"], "prompt_len: 'long' is no length distribution"),
            (["--arrivals=never"], "arrivals: 'never' is no arrival process"),
            (["--check=maybe"], "check is 'maybe': it must be true or false"),
            (["--core-us=soon"], "core_us is 'soon': it must be a number"),
            (["--core-us=-1"], "core_us is -1.0: it must be 0 or more, or measured"),
            (["--window=0"], "window is 0: it must be from 1 to 16"),
            (["--seed=-1"], "seed is -1"),
            (["--executors=0"], "executors is 0: it must be from 1 to 64"),
            (["--dp-size=65"], "executors is 65: it must be from 1 to 64"),
            (["--executor-blocks=9:few"], "executor_blocks is 'few': it must be a whole number"),
            (["--executors=2", "--executor-blocks=9:0"], "max_num_blocks"),
            (["--kill-executor-at=-1"], "kill_executor_at is -1.0: it must be 0 or more"),
            (["--kill-executor=1"], "kill_executor is 1: there are 1, counted from 0"),
            (["--executors=2", "--routing=best"], "routing is 'best': it must be one of"),
            (["--token-s=-1"], "token_s is -1.0"),
            (["--block-size=0"], "block_size must be greater than 0"),
            (["--schedule-conservativeness=-1"], "schedule_conservativeness"),
            (["--trace=/nowhere"], "cannot read /nowhere"),
            (["--trace=/nowhere", "--requests=5"], "takes the place of a workload"),
            (["--compare=window"], "'window' is no comparison: write NAME=VALUE,VALUE,..."),
            (["--compare=window=1,,2"], "is no comparison"),
            (["--compare=window=1,1"], "names a value twice"),
            (["--compare=window=1", "--compare=window=2"], "compared twice"),
            (["--compare=colour=red"], "unknown name 'colour'"),
            (["--compare=window=1,x"], "window is 'x'"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_wrong_value_is_one_line(self, capsys, flags, said):
        """
        A value that cannot be is one line on stderr that names it, exit code 2, and nothing runs.
        """
        assert 2 == main([*flags])
        printed = capsys.readouterr()
        assert "" == printed.out
        assert said in printed.err
        assert 1 == len(printed.err.splitlines())

    @pytest.mark.parametrize("error", [InternalError, SessionLost])
    def test_failed_check_is_one_line_and_no_wrong_usage(self, capsys, monkeypatch, error):
        """
        A simulation whose check fails is one line on stderr that says which, and exit code 1, not that of wrong flags.
        """

        def failing(*_: object):
            raise error("slot 3 reads KV of\nothers")

        monkeypatch.setattr("tandem_simulator.audit.Audit.before_step", failing)
        assert 1 == main([*FLAGS, "--requests=5", "--check"])
        assert ("", "simulate: slot 3 reads KV of others\n") == capsys.readouterr()

    def test_unknown_flag_is_refused(self, capsys):
        """
        A flag that does not exist, or is cut short, ends with usage and code 2.
        """
        for flag in ("--colour=red", "--reques=5"):
            with pytest.raises(SystemExit) as ended:
                main([flag])
            assert 2 == ended.value.code
            assert flag in capsys.readouterr().err

    def test_unwritable_plot_folder_is_refused(self, capsys, tmp_path):
        """
        A plot folder that is a file is an error that names it.
        """
        (tmp_path / "file").write_text("")
        assert 2 == main([*FLAGS, "--requests=5", f"--plot={tmp_path / 'file'}"])
        assert "cannot write plots to" in capsys.readouterr().err


class TestPlots:
    @pytest.mark.slow
    def test_plots_are_written_and_repeat(self, tmp_path):
        """
        --plot writes pictures of latencies and memory, the same bytes for the same run.
        """
        axes = ["--compare", "window=1,2", "--requests=20"]
        for name in ("a", "b"):
            assert 0 == main([*FLAGS, *axes, "--plot", str(tmp_path / name)])
        written = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
        assert {"latency.svg", "memory.svg"} == set(written)
        assert written == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
        assert all(b"window=2" in content for content in written.values())

    def test_missing_matplotlib_is_a_clear_error(self, capsys, monkeypatch, tmp_path):
        """
        Without matplotlib --plot ends before anything runs and says which extra to install.
        """
        for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
            monkeypatch.delitem(sys.modules, name)
        real = builtins.__import__

        def without(name, *args, **kwargs):
            if name.split(".")[0] == "matplotlib":
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without)
        monkeypatch.setattr("importlib.import_module", without)
        assert 2 == main([*FLAGS, f"--plot={tmp_path}"])
        printed = capsys.readouterr()
        assert install_command("plots") in printed.err
        assert [] == list(tmp_path.iterdir())
