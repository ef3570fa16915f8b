"""The benchmark of the step link: what it measures and prints, not how long anything takes."""

from __future__ import annotations

import json
import os
import signal
from types import SimpleNamespace
from typing import ClassVar, Self

import psutil
import pytest
from typer.testing import CliRunner

from tandem_bench.__main__ import main
from tandem_bench.link import command as link
from tandem_bench.link import processes as link_processes
from tandem_bench.link.command import MAIN_POINTS, Costs, Point, _chosen, _measure, _parser
from tandem_bench.link.processes import BenchFailed, CoreWithClients, started_reader
from tandem_bench.stream.service import StreamService
from tandem_client.cli.app import app

KEYS = [
    *("step_ms", "rows", "window", "transport", "clients", "executors"),
    *("steps_per_s", "idle_percent", "scheduler_cpu_us", "executor_cpu_us"),
]
TINY = ["--step-ms", "3", "--rows", "2", "--seconds", "1"]


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
        asked = points("--rows", "1", "150", "1024", "--clients", "80")
        assert [(1, 1), (150, 75), (1024, 64)] == [(point.rows, point.clients) for point in asked]


class FakeExecutor:
    """
    Executor that reports so many rows for each step, and a device that is busy half of the time.
    """

    def __init__(self, rows: int, until_step: int) -> None:
        self._rows, self._until_step = rows, until_step
        self._report = dict.fromkeys(("steps", "rows", "busy_ns", "idle_ns"), 0)

    def cpu_ns(self) -> int:
        return 0

    def report(self) -> dict[str, float]:
        for _ in range(10):
            at = self._report["steps"]
            for name, more in (("steps", 1), ("busy_ns", 500), ("idle_ns", 500)):
                self._report[name] += more
            self._report["rows"] += self._rows if at < self._until_step else 0
        return dict(self._report)


class FakeCore:
    pid = os.getpid()

    def __init__(self, lost: int) -> None:
        self._lost = lost

    def check(self) -> None:
        if self._lost:
            raise BenchFailed("not all streams were served")

    def close(self) -> None:
        pass


class TestMeasuring:
    POINT = Point(2.0, 8, 2, "unix", 8)

    def test_steady_requests_are_measured(self):
        """
        Idle time is a share of the time in which all requests ran.
        """
        costs = _measure(self.POINT, FakeExecutor(8, 1000), FakeCore(0), 0.0)
        assert 50.0 == costs.idle_percent

    @pytest.mark.parametrize(
        ("until_step", "lost", "why"),
        [(30, 0, "requests ended"), (1000, 1, "not all streams")],
        ids=["ended", "lost"],
    )
    def test_what_was_not_steady_is_no_measurement(self, until_step, lost, why):
        """
        A measurement fails, and prints nothing, when requests ended or streams lost what was made.
        """
        with pytest.raises(BenchFailed, match=why):
            _measure(self.POINT, FakeExecutor(8, until_step), FakeCore(lost), 0.0)


class TestSweep:
    def test_point_that_fails_leaves_the_others(self, monkeypatch, capsys):
        """
        A point that cannot be measured is named, the others are printed, and the exit code is 1.
        """

        def measure(point: Point, *, seconds: float) -> Costs:
            if point.rows == 2:
                raise BenchFailed("no 2 requests ran together")
            return Costs(point, 1.0, 2.0, 3.0, 4.0)

        monkeypatch.setattr(link, "measure", measure)
        assert 1 == link.main(["--rows", "1", "2", "4", "--json"])
        printed = capsys.readouterr()
        assert [1, 4] == [point["rows"] for point in json.loads(printed.out)]
        assert (
            "bench link: 2 ms, 2 rows, window 2, unix, 0 clients: no 2 requests ran together\n"
            == printed.err
        )


class FakeExecutors:
    address = "127.0.0.1:1"

    def __len__(self) -> int:
        return 1


class TestProcesses:
    @pytest.mark.parametrize("kind", [CoreWithClients, StreamService])
    def test_service_that_is_late_is_ended(self, monkeypatch, tmp_path, kind):
        """
        A service that does not listen in time is an error with a sentence, and does not outlive it.
        """
        monkeypatch.setattr("tandem_bench.link.processes.START_DEADLINE_S", 0.0)
        executor = FakeExecutors()
        arguments = {
            CoreWithClients: {"rows": 1, "window": 2, "run_ahead": 2, "clients": 1},
            StreamService: {"streams": 1, "frontends": 1},
        }[kind]
        before = set(psutil.Process().children())
        with pytest.raises(BenchFailed, match="the scheduler did not listen"):
            kind(executor, **arguments, directory=tmp_path)
        assert set(psutil.Process().children()) <= before


class FakeReader:
    """Reports of one attempt after another, each of which ends with the last of its reports."""

    attempts: ClassVar[list[list[dict[str, object]]]] = []

    def __init__(self, *_: object, **__: object) -> None:
        self._reports = self.attempts.pop(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.attempts.append([])  # closed

    def report(self) -> SimpleNamespace:
        report = {"streams": 2, "started": 0, "statuses": {}} | self._reports.pop(0)
        return SimpleNamespace(failed=sum(report["statuses"].values()), **report)


class TestStarting:
    def test_streams_that_came_too_early_are_opened_again(self, monkeypatch):
        """
        All streams are opened again until all are accepted, if a frontend has no executor at first.
        """
        monkeypatch.setattr(link_processes, "start_reader", FakeReader)
        early = [{"started": 1}, {"started": 1, "statuses": {"14": 1}}]
        monkeypatch.setattr(FakeReader, "attempts", [early, [{}, {"started": 2}]])
        started_reader("127.0.0.1:1", [b""] * 2)
        assert [[]] == FakeReader.attempts

    def test_streams_that_fail_for_good_are_an_error(self, monkeypatch):
        """
        Another status is told, and the reader is closed.
        """
        monkeypatch.setattr(link_processes, "start_reader", FakeReader)
        monkeypatch.setattr(FakeReader, "attempts", [[{"statuses": {"3": 1}}]])
        with pytest.raises(BenchFailed, match=r"streams did not start: .*'3'"):
            started_reader("127.0.0.1:1", [b""] * 2)
        assert [[]] == FakeReader.attempts


class TestOutput:
    @pytest.mark.slow
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
    @pytest.mark.parametrize("clients", [0, 2])
    def test_several_executors_have_their_rows_each(self, capfd, clients):
        """
        With several executors each has all the rows, from requests of its own or from streams.
        """
        flags = [*TINY, "--executors", "1", "2", "--clients", str(clients), "--json"]
        assert 0 == main(["link", *flags])
        alone, both = json.loads(capfd.readouterr().out)
        assert (1, 2) == (alone["executors"], both["executors"])
        assert 0 < both["steps_per_s"]
        assert 0 <= both["idle_percent"] < 100

    @pytest.mark.slow
    def test_whole_service_with_clients(self, capfd):
        """
        `tandem bench link` with clients measures a whole service with streams that are read.
        """
        flags = [*TINY, "--clients", "2", "--transport", "tcp", "--json"]
        result = CliRunner().invoke(app, ["bench", "link", *flags])
        assert 0 == result.exit_code
        (costs,) = json.loads(capfd.readouterr().out)
        assert (3.0, 2, 2, "tcp", 2) == tuple(costs.values())[:5]
        assert 0 < costs["scheduler_cpu_us"]

    @pytest.mark.parametrize(
        "wrong",
        [
            ["--rows", "0"],
            ["--step-ms", "0"],
            ["--transport", "pigeon"],
            ["--clients=-1"],
            ["--window", "17"],
            ["--clients", "2", "--rows", "34"],
        ],
        ids=" ".join,
    )
    def test_wrong_flags_are_refused(self, wrong, capsys):
        """
        A value that makes no sense ends with usage, exit code 2.
        """
        with pytest.raises(SystemExit, match="2"):
            main(["link", *wrong])
        printed = capsys.readouterr()
        assert wrong[0].partition("=")[0] in printed.err
        assert "" == printed.out

    def test_command_leaves_signals_as_they_were(self):
        """
        `tandem bench link` passes the exit code on and has SIGTERM do afterwards what it did before.
        """
        before = signal.getsignal(signal.SIGTERM)
        result = CliRunner().invoke(app, ["bench", "link", "--transport=pigeon"])
        assert 2 == result.exit_code
        assert before == signal.getsignal(signal.SIGTERM)
