"""Log lines about requests that may have killed an executor; operators get each as a warning."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler_svc.core.observe.step_log import NO_IDS, sentence_line
from scheduler_svc.core.request.events import LogLine
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.suspects import Mark

NUM_NAMED = 8
"""Most requests that one line names."""


def death_line(blamed: list[Mark], num_suspects: int, executor: int | None = None) -> LogLine:
    """
    Return the line of a death, counted against these requests; `executor` where there are several.
    """
    text = f"{_executor(executor)} died in a step of {_named(blamed)}."
    if num_suspects:
        text += (
            f" {num_suspects} request{' was' if num_suspects == 1 else 's were'} in more than one "
            "such step without getting on in between: tried in parts while all others "
            f"{'wait' if executor is None else 'run on other executors'}."
        )
    return _line(text, _ids(blamed))


def trial_line(tried: list[Mark], num_suspects: int) -> LogLine:
    """Return the line of a trial that begins with these requests, suspects or a control."""
    if any(mark.is_suspect for mark in tried):
        text = f"Trial: of {num_suspects} suspects only {_named(tried)} may run."
    else:
        text = f"Trial of the executor: only {_named(tried)} may run, which is not suspected."
    return _line(text, _ids(tried))


def passed_line(cleared: list[Mark], num_suspects: int) -> LogLine:
    """Return the line of a trial in which these requests got on."""
    text = f"Trial passed by {_named(cleared)}; suspects left: {num_suspects}."
    return _line(text if num_suspects else f"{text} All requests run again.", _ids(cleared))


def poison_line(request: Request) -> LogLine:
    """Return the line of a request that fails, since it kills executors."""
    name = request.new.request_id
    text = f"Request {name} fails as POISON_REQUEST: executors died twice with it alone."
    return _line(text, request.new.log_ids)


def broken_line(num_victims: int) -> LogLine:
    """Return the line of requests that fail, since the executor dies whatever it computes."""
    return _line(
        f"{num_victims} requests fail as EXECUTOR_LOST: the executor died under each of them "
        "alone and got on with no other, so it is to blame itself: see its log, and replace it."
    )


def spared_line(executor: int, num_victims: int) -> LogLine:
    """Return the line of requests that run elsewhere, since an executor dies of anything."""
    return _line(
        f"Executor {executor} died under each of {num_victims} requests alone and got on with no "
        "other, so it is to blame itself: see its log, and replace it. They run on another, and it "
        "runs one request at a time until it gets on."
    )


def doubt_line(executor: int, request: Request) -> LogLine:
    """Return the line of a request, or an executor, of which one is to blame."""
    name = request.new.request_id
    text = (
        f"Executor {executor} died twice with {name} alone, and no other request has shown since "
        "that it lives: that one is tried on another executor."
    )
    return _line(text, request.new.log_ids)


def dies_of_anything_line(executor: int, num_deaths: int) -> LogLine:
    """Return the line of an executor that died again and again, each time of other requests."""
    return _line(
        f"Executor {executor} died {num_deaths} times in a row, each time of other requests, so it "
        "may be to blame itself: see its log. It runs one request at a time until it gets on."
    )


def quarantine_line(executor: int, marks: list[Mark]) -> LogLine:
    """Return the line of an executor that takes requests over that may have killed others."""
    text = f"Only executor {executor} runs {_named(marks)}, as one died in a step of these."
    return _line(text, _ids(marks))


def _executor(number: int | None) -> str:
    return "Executor" if number is None else f"Executor {number}"


def _named(marks: list[Mark]) -> str:
    """Return the number of requests and the names of the first ones."""
    if not marks:
        return "no live request"
    names = [mark.request.new.request_id for mark in marks[:NUM_NAMED]]
    more = ", ..." if len(marks) > NUM_NAMED else ""
    count = "1 request" if len(marks) == 1 else f"{len(marks)} requests"
    return f"{count} ({', '.join(names)}{more})"


def _ids(marks: list[Mark]) -> dict[str, object]:
    """Return the ids of the requests that a line names, and of their traces, if they have any."""
    named = [mark.request.new for mark in marks[:NUM_NAMED]]
    if len(named) == 1:
        return {**named[0].log_ids}
    ids: dict[str, object] = {"request_ids": [new.request_id for new in named]}
    if trace_ids := [new.trace_id for new in named if new.trace_id]:
        ids["trace_ids"] = trace_ids
    return ids


def _line(text: str, ids: Mapping[str, object] = NO_IDS) -> LogLine:
    return sentence_line("executor_trial", text, ids)
