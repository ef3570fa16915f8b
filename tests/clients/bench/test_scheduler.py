"""The benchmark of the scheduler: what it prints, not how long anything takes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tandem_bench.scheduler.admission import measure_admission
from tandem_bench.scheduler.command import main
from tandem_bench.scheduler.decode_step import measure_decode_step
from tandem_client.cli.app import app

KEYS = ["running", "waiting", "mean_us", "median_us", "p99_us"]
SMALL = ["--running", "1", "20", "--waiting", "0", "3", "--turns", "30"]


class TestOutput:
    def test_json_is_one_list_and_nothing_else(self, capsys):
        """
        --json prints one list with an object per pair of running and waiting, in the order asked.
        """
        assert 0 == main([*SMALL, "--json"])

        measured = json.loads(capsys.readouterr().out)
        assert [KEYS] * 4 == [list(costs) for costs in measured]
        assert [(1, 0), (1, 3), (20, 0), (20, 3)] == [
            (costs["running"], costs["waiting"]) for costs in measured
        ]
        assert all(
            0 < costs["mean_us"] and costs["median_us"] <= costs["p99_us"] for costs in measured
        )

    def test_table_has_a_row_per_pair_and_the_admission(self, capsys):
        """
        Without --json it prints a table row per pair, then the cost of admitting a long prompt.
        """
        assert 0 == main(SMALL)

        printed = capsys.readouterr().out
        rows = [line.split()[:2] for line in printed.splitlines()[2:6]]
        assert [["1", "0"], ["1", "3"], ["20", "0"], ["20", "3"]] == rows
        assert "2000 tokens" in printed

    def test_parts_are_printed_where_they_are_asked_for(self, capsys):
        """With --parts each row has the time of each part of a turn too."""
        assert 0 == main(["--running", "4", "--waiting", "0", "--turns", "30", "--parts", "--json"])

        (costs,) = json.loads(capsys.readouterr().out)
        parts = ["apply_us", "plan_us", "encode_us", "publish_us"]
        assert [*KEYS, *parts] == list(costs)
        assert all(costs[part] > 0 for part in parts)

    @pytest.mark.parametrize("wrong", ["0", "-1", "many"])
    def test_wrong_counts_are_refused(self, wrong, capsys):
        """
        A count of running requests that is no whole number from 1 on ends with usage, exit code 2.
        """
        with pytest.raises(SystemExit, match="2"):
            main(["--running", wrong])
        assert "--running" in capsys.readouterr().err

    def test_command_line_passes_its_flags_on(self, capfd):
        """
        `tandem bench scheduler --json` prints what the scheduler's own benchmark prints.
        """
        result = CliRunner().invoke(
            app, ["bench", "scheduler", "--running", "2", "--waiting", "1", "--json"]
        )

        assert 0 == result.exit_code
        measured = json.loads(capfd.readouterr().out)
        assert [(2, 1)] == [(costs["running"], costs["waiting"]) for costs in measured]


class TestMeasurement:
    @pytest.mark.parametrize("window", [1, 2])
    def test_every_turn_measured_is_a_step_of_all_that_run(self, window):
        """
        Each measured turn plans one token for every running request, whatever waits meanwhile.
        """
        costs = measure_decode_step(40, 5, num_turns=60, window=window)

        assert (40, 5, 60) == (costs.running, costs.waiting, costs.turns)

    def test_hashing_is_part_of_an_admission_without_digests_only(self):
        """
        An admission is measured with and without given digests, beside the time of the digests.
        """
        costs = measure_admission(5)

        assert 2000 == costs.prompt_len
        assert min(costs.hash_us, costs.given_us, costs.computed_us) > 0
