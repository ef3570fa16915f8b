"""`tandem top` while its server does not answer, and after."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tandem.error_codes import DeadlineExceeded
from tandem.errors import Draining, InternalError
from tandem.status import PeerUnavailable
from tandem_client import AdminClient
from tandem_client.cli.top.view import PATIENCE_S, View
from tandem_client.views.history import SnapshotHistory
from tandem_client.views.snapshot import Snapshot
from tests.clients.python.fake_server import fake_server
from tests.stats import changed
from tests.waiting import wait_until

REFUSED = PeerUnavailable(
    "connection refused", metadata={"connected": "false", "listening": "false"}
)
SILENT = DeadlineExceeded("Deadline Exceeded")


class Clock:
    """Clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stats(server):
    """A snapshot of a server that serves."""
    with AdminClient(server.address) as admin:
        return admin.stats()


@pytest.fixture
def view(stats, clock):
    return View("box:1", SnapshotHistory(Snapshot(stats=stats)), clock)


class TestView:
    def test_short_wait_is_no_news(self, view, clock):
        """
        No trouble is told until a snapshot has waited for a couple of seconds.
        """
        assert view.trouble() is None
        view.ask()
        clock.now_s += PATIENCE_S - 0.1
        assert view.trouble() is None

    @pytest.mark.parametrize(
        ("error", "words"),
        [
            (None, "box:1 has not answered since {} (7 s); still asking;"),
            (SILENT, "box:1 has not answered since {} (7 s); still asking;"),
            (REFUSED, "nothing listens at box:1 since {} (7 s): the server has ended; still look"),
            (PeerUnavailable("reset"), "box:1 cannot be reached since {} (7 s); reconnecting;"),
            (Draining("bye"), "box:1 has refused to answer since {} (7 s): bye; still asking;"),
        ],
        ids=["pending", "silent", "gone", "unreachable", "refused"],
    )
    def test_trouble_says_what_since_when_and_what_is_done(
        self, view, clock, monkeypatch, error, words
    ):
        """
        The line tells why there is no answer, since when, and that it goes on; however often it was asked.
        """
        monkeypatch.setattr("time.strftime", lambda *_: "12:03:05")
        view.ask()
        clock.now_s += 3.0
        if error is not None:
            view.failed(error)
        view.ask()
        clock.now_s += 4.0
        assert view.trouble().startswith(words.format("12:03:05"))
        assert view.trouble().endswith("the values below are from then; Ctrl-C quits")

    def test_answer_ends_it(self, view, clock, stats):
        """
        With the next answer the line is gone and the newest figures are shown.
        """
        view.ask()
        clock.now_s += 60.0
        view.failed(REFUSED)
        view.answered(Snapshot(stats=changed(stats, uptime_s=9e9, running_requests=77)))
        screen = Console(file=io.StringIO(), width=80)
        screen.print(view)
        assert view.trouble() is None
        assert "77 running" in screen.file.getvalue()
        assert "since" not in screen.file.getvalue().splitlines()[0]

    def test_drawing_sees_no_half_snapshot(self, stats, view):
        """
        A drawing at any time of an answer's arrival shows the view before it or the one after it.
        """
        view._history._kept.clear()  # as in the middle of a restart of the server
        screen = Console(file=io.StringIO(), width=80)
        screen.print(view)
        assert f"{stats.running_requests} running" in screen.file.getvalue()

    def test_error_that_no_snapshot_mends_is_raised(self, view):
        """
        An error that another snapshot would only repeat ends the command.
        """
        view.ask()
        with pytest.raises(InternalError):
            view.failed(InternalError("a bug"))


class TestCommand:
    @pytest.mark.slow
    def test_silent_server_is_named_until_it_answers(self, terminal, server):
        """
        On a terminal a server that falls silent is named, and the line is gone when it answers again.
        """
        command = terminal("top", "--interval-s", "0.1", "--admin-address", server.address)
        command.until("attached")
        server.seen.answers_polls.clear()
        assert f"{server.address} has not answered since " in command.until("Ctrl-C quits")
        num_polls = server.seen.num_polls
        server.seen.answers_polls.set()
        wait_until(lambda: server.seen.num_polls > num_polls + 1, "two snapshots")
        command.shown = ""
        command.until("attached")  # it may have begun before
        command.shown = ""
        assert "has not answered" not in command.until("attached")

    @pytest.mark.slow
    def test_server_that_ended_is_called_gone(self, terminal):
        """
        A server that no longer listens is said to have ended, and polling goes on.
        """
        with fake_server() as server:
            command = terminal("top", "--interval-s", "0.1", "--admin-address", server.address)
            command.until("attached")
        assert "the server has ended; still looking" in command.until("still looking")
        assert command.process.poll() is None

    @pytest.mark.slow
    def test_silence_in_a_pipe_is_said_on_stderr(self, tandem, server):
        """
        Stderr says from when on no snapshot came when snapshots are printed one by one.
        """
        process = tandem("top", "--json", "--interval-s", "0.1", "--admin-address", server.address)
        assert process.stdout.readline()
        server.seen.answers_polls.clear()
        line = process.stderr.readline()
        server.seen.answers_polls.set()
        assert line.startswith(f"[waiting: {server.address} has not answered since ")
        assert line.endswith("; still asking]\n")
