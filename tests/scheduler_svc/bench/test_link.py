"""The benchmark of the step link: what it measures and prints, not how long anything takes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from scheduler_svc.bench.__main__ import main
from scheduler_svc.bench.link import MAIN_POINTS, Point, _chosen, _parser
from tandem_client.cli.app import app

KEYS = ["step_ms", "rows", "window", "transport", "clients", "idle_percent", "scheduler_cpu_us"]
TINY = ["--step-ms", "3", "--rows", "2", "--seconds", "0.1"]


def points(*flags: str) -> list[Point]:
    return list(_chosen(_parser().parse_args(flags)))


class TestPoints:
    def test_without_flags_the_main_ones_are_measured(self):
        """
        By default few points are measured: 256 rows, with and without clients, each window.
        """
        assert list(MAIN_POINTS) == points()
        assert {1, 2, 4} == {point.window for point in MAIN_POINTS}
        assert {0, 256} == {point.clients for point in MAIN_POINTS}

    def test_full_is_all_combinations(self):
        """
        --full measures each step time with each number of rows, window, transport and clients.
        """
        full = points("--full")
        assert len(full) == len(set(full)) == 5 * 4 * 3 * 2 * 2
        assert {0.6, 1.0, 2.0, 5.0, 20.0} == {point.step_ms for point in full}
        assert {1, 32, 256, 1024} == {point.rows for point in full}
        assert {"unix", "tcp"} == {point.transport for point in full}

    def test_clients_share_the_rows_evenly(self):
        """
        There are no more clients than rows, and each has as many rows as the others.
        """
        asked = points("--rows", "1", "30", "1024", "--clients", "20")
        assert [(1, 1), (30, 15), (1024, 16)] == [(point.rows, point.clients) for point in asked]


class TestOutput:
    def test_json_is_one_list_and_nothing_else(self, capfd):
        """
        --json prints one list with an object per point.
        """
        assert 0 == main(["link", *TINY, "--window", "2", "--json"])
        (costs,) = json.loads(capfd.readouterr().out)
        assert KEYS == list(costs)
        assert (3.0, 2, 2, "unix", 0) == tuple(costs.values())[:5]
        assert 0 <= costs["idle_percent"] < 100
        assert 0 < costs["scheduler_cpu_us"]

    @pytest.mark.slow
    def test_whole_service_with_clients(self):
        """
        `tandem bench link` with clients measures a whole service whose streams are read.
        """
        flags = [*TINY, "--clients", "2", "--transport", "tcp", "--json"]
        result = CliRunner().invoke(app, ["bench", "link", *flags])
        assert 0 == result.exit_code
        (costs,) = json.loads(result.stdout)
        assert (3.0, 2, 2, "tcp", 2) == tuple(costs.values())[:5]
        assert 0 < costs["scheduler_cpu_us"]

    @pytest.mark.parametrize(
        "wrong", [["--rows", "0"], ["--step-ms", "0"], ["--transport", "pigeon"]]
    )
    def test_wrong_flags_are_refused(self, wrong, capsys):
        """
        A value that makes no sense ends with usage, exit code 2.
        """
        with pytest.raises(SystemExit, match="2"):
            main(["link", *wrong])
        assert wrong[0] in capsys.readouterr().err
