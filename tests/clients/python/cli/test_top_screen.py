"""The screen of `tandem top`: plots, requests and faults, at several sizes."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tandem.admin.v1 import executors_pb2
from tandem_client.admin.activity import Fault, FaultKind, StepSample
from tandem_client.admin.executors import executors_from_proto
from tandem_client.admin.requests import RequestList, RequestState, RequestSummary
from tandem_client.cli.top.plots import ASCII_BARS, BARS, kv_map, sparkline
from tandem_client.cli.top.table import MIN_REQUESTS, table
from tandem_client.cli.top.view import View
from tandem_client.views.history import SnapshotHistory
from tandem_client.views.model import view_of
from tests.clients.python.views.shapes import activity, histogram, snapshot

NUM_REQUESTS = 40


def request(number: int, **changes: object) -> RequestSummary:
    values: dict[str, object] = {
        "request_id": f"request-{number}",
        "choice": 0,
        "state": RequestState.DECODE,
        "tenant": "search",
        "priority": 0,
        "prompt_tokens": 1000 + number,
        "output_tokens": number,
        "cached_tokens": 16,
        "age_s": 3.0,
        "preemptions": 0,
        "time_to_first_token_s": 0.25,
    }
    return RequestSummary(**(values | changes))


def busy_history(*requests: RequestSummary) -> SnapshotHistory:
    """Return snapshots of a server with plots, requests and faults."""
    listed = RequestList(requests=requests, total=len(requests))
    fault = Fault(
        kind=FaultKind.EXECUTOR_LOST, at_s=1.0, where="box:1", reason="silent", message="no word",
        count=2,
    )  # fmt: skip
    step = StepSample(
        number=1, executor="box:1", at_s=1.0, total_s=1.0, compute_s=0.0025, tokens=64, requests=9,
        is_graph=False,
    )  # fmt: skip
    history = SnapshotHistory(snapshot(1.0, executor_attached=True, ttft=histogram()))
    for second in range(2, 9):
        now = histogram(second, second, second)
        seen = activity(
            float(second),
            histograms={"time_to_first_token": now},
            steps=(step, replace(step, number=2, compute_s=0.005)),
            faults=(fault,) * 3,
        )
        newest = snapshot(
            float(second), executor_attached=True, running_requests=2, used_blocks=5, total_blocks=9
        )
        history.add(replace(newest, activity=seen, requests=listed))
    return history


def drawn(
    history: SnapshotHistory, width: int, height: int | None = None, **console: object
) -> list[str]:
    """Return the lines of a screen of this size."""
    screen = Console(record=True, file=io.StringIO(), width=width, **console)
    screen.print(table(view_of(history), width, height=height))
    return screen.export_text().splitlines()


class TestPlots:
    @pytest.mark.parametrize(
        ("values", "width", "expected"),
        [
            ((), 5, ""),
            ((0.0, 0.0), 5, BARS[0] * 2),
            ((0.0, 4.0, 8.0), 5, BARS[0] + BARS[4] + BARS[7]),
            ((100.0, 4.0, 8.0), 2, BARS[4] + BARS[7]),
            ((None, 1.0), 5, " " + BARS[7]),
            ((1.0,), 0, ""),
        ],
    )
    def test_bars_are_of_the_largest_that_is_shown(self, values, width, expected):
        """
        The newest values have a bar each, from 0 to the largest of them; a gap has none.
        """
        assert expected == sparkline(values, width)

    def test_plain_terminal_gets_plain_signs(self):
        """
        A terminal without block characters gets signs of ASCII.
        """
        assert ASCII_BARS[4] + ASCII_BARS[7] == sparkline((4.0, 8.0), 9, ascii_only=True)
        assert "##+..." == kv_map(2, 1, 6, 6, ascii_only=True).plain

    @pytest.mark.parametrize(
        ("used", "cached", "expected"),
        [(0, 0, "........"), (1, 1, "#+......"), (500, 500, "####++++"), (1000, 0, "########")],
    )
    def test_part_that_is_there_has_a_column(self, used, cached, expected):
        """
        The map shares its columns out by blocks, and one block of 1,000 is not rounded away.
        """
        assert expected == kv_map(used, cached, 1000, 8, ascii_only=True).plain


class TestScreen:
    @pytest.mark.parametrize("width", [50, 80, 100, 160])
    def test_no_line_is_wider_than_the_terminal(self, width):
        """
        Plots and columns are as wide as the terminal allows, however many requests there are.
        """
        lines = drawn(busy_history(*map(request, range(NUM_REQUESTS))), width)
        assert all(len(line) <= width for line in lines)
        for name in ("TTFT", "last steps", "last faults", "request "):
            assert any(line.startswith(name) for line in lines), name

    @pytest.mark.parametrize(("width", "is_shown"), [(80, False), (120, True)])
    def test_wide_terminal_has_more_columns(self, width, is_shown):
        """
        Cached tokens, time to first token and preemptions are shown where there is room.
        """
        text = "\n".join(drawn(busy_history(request(1)), width))
        assert is_shown == ("250 ms" in text)
        assert "1,001" in text

    @pytest.mark.parametrize("height", [30, 45])
    def test_requests_fill_the_height_and_no_more(self, height):
        """
        The screen fits a terminal of this height, and says how many requests it leaves out.
        """
        lines = drawn(busy_history(*map(request, range(NUM_REQUESTS))), 100, height)
        num_shown = sum(line.startswith("request-") for line in lines)
        assert len(lines) < height
        assert num_shown > MIN_REQUESTS
        assert f"and {NUM_REQUESTS - num_shown} more" in lines[-1]

    def test_low_terminal_shows_a_few_requests(self):
        """
        A terminal with no room for requests shows a few all the same.
        """
        lines = drawn(busy_history(*map(request, range(NUM_REQUESTS))), 100, 5)
        assert MIN_REQUESTS == sum(line.startswith("request-") for line in lines)

    def test_faults_have_age_and_cause(self):
        """
        A fault is told with its age, place, number and cause.
        """
        lines = drawn(busy_history(), 100)
        assert any(
            "7 s ago: executor lost box:1 (2 times): silent: no word" in one for one in lines
        )

    def test_texts_of_others_cannot_steer_the_terminal(self):
        """
        An id or tenant with escape sequences or markup is shown, not obeyed.
        """
        evil = request(1, request_id="\x1b[2Jgone", tenant="[red]x[/red]")
        screen = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
        screen.print(table(view_of(busy_history(evil)), 100))
        assert "?[2Jgone" in screen.file.getvalue()
        assert "[red]x[/red]" in screen.file.getvalue()
        assert "\x1b[2J" not in screen.file.getvalue()

    def test_screen_follows_the_size_of_the_terminal(self):
        """
        After a terminal has changed its size the next drawing fits it.
        """
        view = View("box:1", busy_history(*map(request, range(NUM_REQUESTS))))
        screen = Console(file=io.StringIO(), width=120, height=60)
        screen.print(view)
        wide = screen.file.getvalue().splitlines()
        screen.file.truncate(0)
        screen.width, screen.height = 60, 30
        screen.print(view)
        narrow = screen.file.getvalue().lstrip("\0").splitlines()
        assert max(map(len, wide)) > max(map(len, narrow))
        assert max(map(len, narrow)) <= 60
        assert len(narrow) < len(wide)


def test_executors_need_no_numbers_to_be_shown():
    """
    An executor that was never reached has a line without a map of its memory.
    """
    proto = executors_pb2.ListExecutorsResponse(
        executors=[
            executors_pb2.ExecutorSummary(
                address=f"box:{at}", state=executors_pb2.EXECUTOR_STATE_CONNECTING
            )
            for at in range(2)
        ]
    )
    history = SnapshotHistory(replace(snapshot(1.0), executors=executors_from_proto(proto)))
    assert any(
        line.split() == ["executors", "box:0", "connecting", "0/0", "-", "-"]
        for line in drawn(history, 80)
    )
