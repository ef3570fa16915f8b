"""Streams are whole or failed, and the table tells of both."""

from __future__ import annotations

import pytest

from tests.deploy.pods.counting.accounts import Counts
from tests.deploy.pods.streams.callers import Received
from tests.deploy.pods.streams.load import HTTP, PYTHON, Failure, Load, Outcome, difference
from tests.deploy.pods.streams.prompts import REQUESTS
from tests.deploy.pods.table import Results, Row, page

OUTPUT = [4, 5, 6, 7]


class Answers:
    """A caller that gives one answer after another, and then the last one for ever."""

    def __init__(self, load: Load, answers: list[Received]) -> None:
        self._load = load
        self._answers = answers

    def stream(self, _, heard) -> Received:
        heard()
        if len(self._answers) == 1:
            self._load.stop()
            return self._answers[0]
        return self._answers.pop(0)

    def close(self) -> None:
        pass


def outcome_of(answers: list[Received], monkeypatch, *, resumes: bool = False) -> Outcome:
    """Return the outcome of the Python client when it gets some answers."""
    monkeypatch.setattr("tests.deploy.pods.streams.load.ASK_AGAIN_S", 0.0)
    monkeypatch.setattr("tests.deploy.pods.streams.load.client_names", lambda _: (PYTHON, HTTP))
    monkeypatch.setattr("tests.deploy.pods.streams.load._caller", lambda *_: None)
    load = Load(None, None, dict.fromkeys(REQUESTS, OUTPUT), 1, resumes=resumes)
    monkeypatch.setattr(load, "_callers", [Answers(load, answers)])
    load.start()
    return load.end()[PYTHON]


def whole() -> Received:
    return Received(token_ids=list(OUTPUT), request_id="whole")


class TestLoad:
    def test_whole_streams_are_finished(self, monkeypatch):
        """
        A stream with the tokens of an undisturbed one counts as finished.
        """
        found = outcome_of([whole(), whole()], monkeypatch)
        assert (2, []) == (found.finished, found.failures)

    @pytest.mark.parametrize(
        ("token_ids", "at"),
        [([4, 5, 6], 3), ([4, 6, 7], 1), ([4, 5, 5, 6, 7], 2), ([4, 5, 6, 7, 8], 4)],
        ids=["end is missing", "token is missing", "token comes twice", "token too many"],
    )
    def test_stream_with_other_tokens_fails(self, monkeypatch, token_ids, at):
        """
        A stream that ends without an error and has other tokens fails, and the first one is told.
        """
        bad = Received(token_ids=token_ids, request_id="bad")
        found = outcome_of([bad, whole()], monkeypatch)
        (failure,) = found.failures
        assert 1 == found.finished
        assert f"token {at} of 4 is not that of an undisturbed stream" in str(failure)
        assert f"{PYTHON}, stream 0 (bad)" in str(failure)

    def test_request_that_no_scheduler_took_is_asked_again(self, monkeypatch):
        """
        Clients that outlive a scheduler ask again where none is there; others have failed then.
        """
        refused = Received(error="connection refused", code="UNAVAILABLE")
        patient = outcome_of([refused, whole()], monkeypatch, resumes=True)
        assert (1, []) == (patient.finished, patient.failures)
        strict = outcome_of([refused, whole()], monkeypatch)
        assert (1, 1) == (strict.finished, len(strict.failures))

    def test_stream_that_broke_is_not_asked_again(self, monkeypatch):
        """
        A stream that a scheduler had accepted fails where it breaks, also for patient clients.
        """
        broken = Received(token_ids=[4], request_id="one", error="reset", code="UNAVAILABLE")
        found = outcome_of([broken, whole()], monkeypatch, resumes=True)
        assert ["after 1 tokens: reset"] == [one.error for one in found.failures]


def test_equal_tokens_have_no_difference():
    """
    Tokens that were expected have no difference to tell.
    """
    assert "" == difference(OUTPUT, tuple(OUTPUT))


class TestTable:
    @staticmethod
    def row(problems: list[str], failures: list[Failure]) -> Row:
        outcomes = {
            PYTHON: Outcome(running=2, finished=30, failures=failures, longest_pause_s=1.5),
            HTTP: Outcome(running=1, finished=20, longest_pause_s=2.25),
        }
        counts = Counts(50, 20)
        return Row(
            event="an event",
            outcomes=outcomes,
            counts=counts,
            problems=problems,
            ends_scheduler=False,
        )

    def text(self, row: Row) -> str:
        return page([Results(setting="local-podman", ready_s=23.4, rows=[row])], 16)

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
        assert "counted 50." in self.text(row)

    def test_problem_takes_the_place_of_the_counts(self):
        """
        A problem is told instead of counts that would hide it.
        """
        row = self.row(["the gateway was not reached"], [])
        assert not row.is_good
        assert "Wrong: an event: the gateway was not reached." in self.text(row)
        assert "counted" not in self.text(row)
