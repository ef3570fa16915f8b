"""Lines of the log about refused calls."""

from __future__ import annotations

import pytest
import structlog
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.testing import capture_logs

from scheduler_svc.frontend.calls.failures import typed_failure
from scheduler_svc.frontend.calls.refusal_lines import RefusalLines
from tandem.error_codes import PermissionDenied, Unauthenticated
from tandem.errors import InvalidParameter, QueueFull
from tests.scheduler_svc.frontend.fake_core import until

METHOD = "/tandem.inference.v1.InferenceService/GetModel"
WATCH = "/grpc.health.v1.Health/Watch"


async def test_refusals_after_the_first_share_a_line(at_once):
    """
    The first of a kind has its own line; those that follow are told together, with their number,
    and afterwards the next one has a line of its own again.
    """
    structlog.reset_defaults()
    lines, error = RefusalLines(), Unauthenticated("no token")
    with capture_logs(processors=[merge_contextvars]) as logged:
        with bound_contextvars(trace_id="of the first"):
            assert [True, *[False] * 9] == [lines.has_own_line(error, METHOD) for _ in range(10)]
        await until(lambda: logged)
        assert [{"num_calls": 9, "reason": "UNAUTHENTICATED"}] == [told(line) for line in logged]
        await until(lambda: lines.has_own_line(error, METHOD))


async def test_credentials_are_told_apart(at_once):
    """
    Refusals of each credential are summed up by themselves, under its name.
    """
    structlog.reset_defaults()
    lines, error = RefusalLines(), PermissionDenied("not yours")
    with capture_logs(processors=[merge_contextvars]) as logged:
        for name in ("acme", "globex"):
            with bound_contextvars(credential=name):
                assert lines.has_own_line(error, METHOD)
                assert not lines.has_own_line(error, METHOD)
        await until(lambda: len(logged) == 2)
    assert ["acme", "globex"] == [line["credential"] for line in logged]


async def test_failures_of_requests_have_a_line_each():
    """
    Failures of a caller with a place are told each time, so that its request is found; those of
    methods that need no credential are not.
    """
    lines = RefusalLines()
    for error in (InvalidParameter("bad", field="text"), QueueFull("full")):
        assert lines.has_own_line(error, METHOD)
        assert lines.has_own_line(error, METHOD)
        assert lines.has_own_line(error, WATCH)
        assert not lines.has_own_line(error, WATCH)


async def test_every_failure_is_counted_by_its_reason():
    """
    Failures count whether they have a line of their own or not, and a bug counts as INTERNAL.
    """
    lines = RefusalLines()
    for error in (*[Unauthenticated("no token")] * 3, QueueFull("full"), ValueError("bug")):
        typed_failure(error, METHOD, lines)
    assert {"UNAUTHENTICATED": 3, "QUEUE_FULL": 1, "INTERNAL": 1} == lines.num_failed


def told(line):
    """Return what a line says besides its event."""
    assert "calls_refused" == line["event"]
    return {key: value for key, value in line.items() if key not in {"event", "log_level"}}


@pytest.fixture
def at_once(monkeypatch):
    """Have a line follow as soon as the event loop gets to it."""
    monkeypatch.setattr("scheduler_svc.frontend.calls.refusal_lines.INTERVAL_S", 0.0)
