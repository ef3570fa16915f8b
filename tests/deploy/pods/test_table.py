"""The table tells of streams, of counts, and of all that is wrong."""

from __future__ import annotations

from tests.deploy.events.streams.callers import HTTP, PYTHON
from tests.deploy.events.streams.load import Failure, Outcome
from tests.deploy.events.table import Row
from tests.deploy.pods.counting.accounts import Counts
from tests.deploy.pods.table import Counted, Results, page


class TestTable:
    @staticmethod
    def row(problems: list[str], failures: list[Failure]) -> Row:
        outcomes = {
            PYTHON: Outcome(running=2, finished=30, failures=failures, longest_pause_s=1.5),
            HTTP: Outcome(running=1, finished=20, longest_pause_s=2.25),
        }
        return Row(
            event="an event",
            outcomes=outcomes,
            problems=problems,
        )

    @staticmethod
    def text(row: Row) -> str:
        counted = [Counted(row=row, counts=Counts(50, 20))]
        return page([Results(setting="local-podman", ready_s=23.4, counted=counted)], 16)

    def test_clients_have_columns_and_events_rows(self):
        """
        A row has what ran, finished and failed of each client, and the longest pause of all.
        """
        failure = Failure(client=PYTHON, number=3, request_id=None, error="lost")
        row = self.row([], [failure])
        assert not row.is_good
        text = self.text(row)
        assert f"| event | {PYTHON} | {HTTP} | longest pause of a stream |" in text
        assert "| an event | 2, 30, 1 | 1, 20, 0 | 2.2 s |" in text

    def test_counts_of_prometheus_are_told(self):
        """
        Without problems the numbers of clients and of Prometheus stand in one line.
        """
        row = self.row([], [])
        assert row.is_good
        assert "clients finished 50 streams" in self.text(row)
        assert "counted 50," in self.text(row)
        assert "clients over HTTP finished 20 streams; Prometheus counted 20." in self.text(row)

    def test_problem_takes_the_place_of_the_counts(self):
        """
        A problem is told instead of counts that would hide it.
        """
        row = self.row(["the gateway was not reached"], [])
        assert not row.is_good
        assert "Wrong: an event: the gateway was not reached." in self.text(row)
        assert "counted" not in self.text(row)
