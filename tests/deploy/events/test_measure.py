"""A row tells of streams and of what an event found wrong, and a page holds the table."""

from __future__ import annotations

import pytest

from tests.deploy.events import measure as measured
from tests.deploy.events.event import NUM_EXECUTORS, Event, EventFailed
from tests.deploy.events.streams.load import Outcome
from tests.deploy.events.table import RESULTS, write_between
from tests.waiting import TooLate


class Streams:
    """A load whose streams all finish, or never run."""

    def __init__(self, *, can_run: bool = True) -> None:
        self.can_run = can_run
        self.has_stopped = False

    def start(self) -> None:
        pass

    def wait_until_running(self) -> None:
        if not self.can_run:
            raise TooLate("all streams have tokens")

    def stop(self) -> None:
        self.has_stopped = True

    def end(self) -> dict[str, Outcome]:
        assert self.has_stopped
        return {"python": Outcome(running=1, finished=2)}


class Waited:
    """A cluster that notes for how many executors it was waited."""

    def __init__(self) -> None:
        self.waits: list[int] = []

    def wait_for(self, num_executors: int) -> None:
        self.waits.append(num_executors)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Let no stream go on after an event."""
    monkeypatch.setattr(measured, "SETTLED_S", 0.0)


def fail(cluster: Waited) -> None:
    raise EventFailed("a port shows an old certificate")


class TestMeasure:
    def test_event_that_goes_well_has_a_good_row(self):
        """
        The row has the streams' outcomes, and the cluster was waited for after the event.
        """
        cluster = Waited()
        row = measured.measure(Event("one", lambda one: one.waits.append(0)), cluster, Streams())
        assert row.is_good
        assert [0, NUM_EXECUTORS] == cluster.waits
        assert "| one | 1, 2, 0 | 0.0 s |" == str(row)

    def test_event_that_finds_something_wrong_is_a_problem_of_its_row(self):
        """
        An EventFailed is told in the row, whose streams are counted all the same.
        """
        row = measured.measure(Event("one", fail), Waited(), Streams())
        assert ["a port shows an old certificate"] == row.problems
        assert (2, False) == (row.finished, row.is_good)

    def test_streams_that_never_run_are_a_problem(self):
        """
        An event under streams of which some never had tokens is not called good.
        """
        row = measured.measure(Event("one", lambda _: None), Waited(), Streams(can_run=False))
        assert ["all streams have tokens"] == row.problems


class TestPage:
    def test_text_between_mark_and_end_is_replaced(self, tmp_path):
        """
        The text before the mark and after its end stays.
        """
        page = tmp_path / "README.md"
        page.write_text(f"before\n{RESULTS}\nold\n\n<!-- end -->\nafter\n")
        write_between(page, RESULTS, "new\n")
        assert f"before\n{RESULTS}\nnew\n\n<!-- end -->\nafter\n" == page.read_text()

    def test_page_without_an_end_is_refused(self, tmp_path):
        """
        A page that would lose all after the mark is left as it is.
        """
        page = tmp_path / "README.md"
        page.write_text(f"before\n{RESULTS}\nold\n")
        with pytest.raises(ValueError, match="end"):
            write_between(page, RESULTS, "new\n")
        assert "old" in page.read_text()
